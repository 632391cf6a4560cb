"""What pages for people say, in English or Chinese, and how they write numbers."""

import html

ZH = {
    # Training records.
    "Training record": "训练记录",
    "Curves": "曲线",
    "What came of it": "训练结果",
    "The run": "运行情况",
    "Data and batches": "数据与批次",
    "Weights": "权重",
    "Steps": "各步指标",
    "Settings": "设置",
    "Placement": "放置（placement）",
    "Environment": "环境",
    "held-out rows": "留出的行",
    "held-out pairs": "留出的回答对",
    "held-out prompts": "留出的提示",
    "before": "训练前",
    "after": "训练后",
    "perplexity": "困惑度",
    "perplexity of responses": "回答的困惑度",
    "loss (nats per token)": "损失（nats/token）",
    "loss (nats per pair)": "损失（nats/对）",
    "learning rate": "学习率",
    "accuracy (share)": "准确率",
    "ties (share)": "平局占比",
    "accuracy of “the longer one”": "“选更长的”的准确率",
    "score of chosen responses": "chosen 回答的分数",
    "score of rejected responses": "rejected 回答的分数",
    "expected calibration error": "期望校准误差（ECE）",
    "score": "分数",
    "score of the judge": "裁判（judge）的分数",
    "wins over SFT by score": "按分数对 SFT 的胜率",
    "wins over SFT by the judge": "按裁判（judge）对 SFT 的胜率",
    "wins over SFT by the endpoint": "按接口（endpoint）对 SFT 的胜率",
    "tokens of a response that differ (share)": "回答中不同 token 的占比",
    "pairs of tokens that differ (share)": "不同的相邻 token 对的占比",
    "phrases of four tokens that came before (share)": "重复出现的四 token 短语的占比",
    "exactly right, greedy (share)": "贪心解码时完全正确的占比",
    "KL to SFT (nats per response)": "与 SFT 的 KL（nats/回答）",
    "entropy (nats per token)": "熵（nats/token）",
    "response length (tokens)": "回答长度（token）",
    "exactly right (share)": "完全正确的占比",
    "ended by eos (share)": "以 eos 结束的占比",
    "RLHF - SFT (95 % interval)": "RLHF − SFT（95 % 区间）",
    "step": "步",
    "steps": "步数",
    "went on after step (times and memory are told of the rest)": (
        "从这一步之后续跑（时间和内存只计其余部分）"
    ),
    "time in all": "总用时",
    "of it, saving states": "其中保存状态",
    "seconds a step, median": "每步秒数，中位数",
    "of it": "其中",
    "sampling responses": "采样回答",
    "scoring them": "打分",
    "learning from them": "更新",
    "rows a second": "每秒行数",
    "prompts a second": "每秒提示数",
    "tokens a second": "每秒 token 数",
    "TFLOP/s, all processes": "TFLOP/s，所有进程合计",
    "share of the GPUs' peak (MFU)": "占 GPU 峰值的比例（MFU）",
    "peak memory of the first process (MB)": "第一个进程的内存峰值（MB）",
    "peak memory of its GPU (MB)": "其 GPU 的显存峰值（MB）",
    "steps left out, too large for fp16": "因 fp16 溢出而跳过的步数",
    "rows to train on": "训练用的行数",
    "rows held out": "留出的行数",
    "of them, cut": "其中被截断的",
    "dropped before": "此前丢弃的",
    "tokens of": "token 数：",
    "datasets": "数据集",
    "rows of a step": "每步的行数",
    "steps of an epoch": "每轮的步数",
    "epochs": "轮数",
    "steps planned": "计划的步数",
    "mean tokens of a row": "每行平均 token 数",
    "tokens of a pass, at most": "单次前向的 token 数上限",
    "processes": "进程数",
    "tokens learnt": "学习过的 token 数",
    "weights": "权重数",
    "trained": "其中训练的",
    "layers": "层数",
    "hidden size": "隐藏维度",
    "model": "模型",
    "actor": "actor",
    "critic": "critic",
    "host": "主机",
    "system": "系统",
    "cores": "核数",
    "threads": "线程数",
    "Operations are counted as by Chowdhery et al. 2022 (PaLM), appendix B: for a token, 6 for each"
    " weight (4 where it is not trained) and 12 · layers · hidden size · mean length of a sequence"
    " for attention; RLHF adds forward passes (2, and a third of attention). Padding and what is"
    " computed twice to save memory do not count. Peaks of GPUs are those of 16-bit numbers in"
    " NVIDIA's data sheets, without sparsity. Rates are those of the median step: without saving,"
    " loading and evaluation.": (
        "运算量按 Chowdhery 等 2022（PaLM）附录 B 计算：对每个 token，每个权重计 6 次"
        "（不训练的权重计 4 次），注意力另计 12 · 层数 · 隐藏维度 · 序列平均长度；RLHF 再加上"
        "各次前向（每个权重 2 次，注意力为上述的三分之一）。填充和为节省内存而做的重复计算不计入。"
        "GPU 峰值取自 NVIDIA 数据手册的 16 位稠密算力。各项速率按中位数的一步计算，"
        "不含保存、加载和评估。"
    ),
    # Comparisons of recipes.
    "Settings that differ": "不同的设置",
    "Results": "结果",
    "seed": "随机种子",
    "Of one run: the figure and, where held-out prompts were drawn anew, its 95 % interval over"
    " prompts. Of several seeds: their mean, and Student's 95 % interval over seeds; curves show"
    " the mean, and the range of the seeds. Settings of jobs before the training have the job's"
    " name in front.": (
        "单次训练：给出数值；若对留出的提示做过重采样，括号内为对提示的 95 % 区间。多个种子：给出"
        "均值，以及对种子的 Student 95 % 区间；曲线为均值，色带为各种子的范围。训练之前各任务的设置"
        "以任务名开头。"
    ),
    # Responses side by side, and responses scored.
    "Responses side by side": "各模型回答并排对照",
    "greedy": "贪心解码",
    "sampled": "采样",
    "beam search": "束搜索（beam search）",
    "Sampled: at temperature {temperature}, by seed {seed}. Beam search: {num_beams} beams."
    " A response has at most {max_response_length} tokens; […] stands where one had not ended.": (
        "采样：温度 {temperature}，种子 {seed}。束搜索：{num_beams} 个束。"
        "每个回答最多 {max_response_length} 个 token；未结束的回答以 […] 标出。"
    ),
    "Good and bad responses, scored": "好回答与差回答的得分",
    "The good response has the higher score in {accuracy} of {pairs} pairs; ties: {ties}."
    " Mean margin: {margin}.": (
        "{pairs} 对回答中，好回答得分更高的占 {accuracy}；平局：{ties}。平均分差：{margin}。"
    ),
    "prompt": "提示",
    "good response (chosen)": "好回答（chosen）",
    "bad response (rejected)": "差回答（rejected）",
    "margin": "分差",
    "higher score": "得分更高者",
    "chosen": "chosen",
    "rejected": "rejected",
    "tie": "平局",
    # Comparisons of ZeRO stages.
    "ZeRO stages": "ZeRO 各阶段的比较",
    "ZeRO stage": "ZeRO 阶段",
    "loss": "损失",
    "gradient norm": "梯度范数",
    "loss of the first step": "第一步的损失",
    "loss of the last step": "最后一步的损失",
    "largest difference of losses": "损失的最大差",
    "largest difference of gradient norms": "梯度范数的最大差",
    "elements sent a step": "每步发送的元素数",
    "out of memory": "内存不足",
    "Losses are the same at all stages, to the last bit.": "各阶段的损失完全相同，每一位都一样。",
    "Losses differ from those of stage {base} by at most {value} (stage {stage}).": (
        "损失与阶段 {base} 相比最多相差 {value}（阶段 {stage}）。"
    ),
    "A step took from {low} s (stage {first}) to {high} s (stage {last}).": (
        "每步用时最短 {low} 秒（阶段 {first}），最长 {high} 秒（阶段 {last}）。"
    ),
    "Peak memory was from {low} MB (stage {first}) to {high} MB (stage {last}).": (
        "内存峰值最低 {low} MB（阶段 {first}），最高 {high} MB（阶段 {last}）。"
    ),
    "Nodes: {nodes}, GPUs in each: {gpus}, processes: {processes}, dtype: {dtype}.": (
        "节点数：{nodes}，每个节点的 GPU 数：{gpus}，进程数：{processes}，dtype：{dtype}。"
    ),
    "With {dtype}, stage {stage} runs as stage 2.": "使用 {dtype} 时，阶段 {stage} 按阶段 2 运行。",
    "One process has nobody to share with: it cuts nothing up, and sends nothing.": (
        "只有一个进程，无从分担：什么都不切分，也什么都不发送。"
    ),
    "Offload: of the optimizer from stage 1 on, of parameters at stage 3 alone.": (
        "卸载（offload）：优化器从阶段 1 起，参数只在阶段 3。"
    ),
    "Elements sent: by each process, in a step of one pass, by formula (Rajbhandari et al. 2020,"
    " ZeRO, section 7): twice the trained weights, and at stage 3 the trained ones once and all"
    " weights twice.": (
        "发送的元素数：每个进程在只有一次前向的一步中发送的数量，按公式计算（Rajbhandari 等 2020，"
        "ZeRO，第 7 节）：训练的权重数的两倍；阶段 3 为训练的权重数的一倍加全部权重数的两倍。"
    ),
}


def teller(language):
    """A function of an English text: what it is in a language (en or zh)."""
    return (lambda text: text) if language == "en" else ZH.__getitem__


def as_number(value):
    """A number as people read it: large ones in thousands, small ones to four digits."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def as_time(seconds):
    """Seconds as h:mm:ss, or to a tenth where they are fewer than a minute."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def as_cell(value):
    """A number or a text as a cell of a Markdown table, whatever the text holds."""
    text = value if isinstance(value, str) else as_number(value)
    escaped = html.escape(" ".join(text.split()), quote=False)
    # Neither a cell more nor a link.
    return escaped.replace("|", "&#124;").replace("](", "]&#40;")
