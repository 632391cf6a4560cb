# The reward model, trained on chosen and rejected responses to the same prompt.


@job("tokenize_reward", folder="tokens/reward")
def describe_tokenize_reward(name):
    settings = recipe("reward", name)
    return {
        "settings": {key: settings[key] for key in ("datasets", "max_length")},
        "inputs": {"tokenizer": tokenizer_model("reward", name), **phase_inputs("reward", name)},
    }


@job("train_reward", folder="reward")
def describe_train_reward(name):
    return {
        "settings": science(recipe("reward", name)),
        "inputs": {"model": base_model("reward", name), "tokens": ("tokenize_reward", name)},
    }


@job("evaluate_reward", folder="eval/reward")
def describe_evaluate_reward(name):
    return {
        "settings": {},
        "inputs": {
            "model": ("train_reward", name),
            "tokens": ("tokenize_reward", name),
        },
    }


rule tokenize_reward:
    message:
        "Tokenizing the reward phase for {wildcards.name}"
    input:
        unpack(inputs("tokenize_reward")),
    output:
        "output/tokens/reward/{name}.manifest.json",
    log:
        "output/logs/tokenize_reward/{name}.log",
    conda:
        "../envs/rlhf.yaml"
    shell:
        "python {ROOT:q}/scripts/tokenize_reward.py --spec {input.spec} 2>&1 | tee {log}"


rule train_reward:
    message:
        "Training reward model {wildcards.name}"
    input:
        unpack(inputs("train_reward")),
    output:
        "output/reward/{name}.manifest.json",
    params:
        placement=placement_json("reward"),
    log:
        "output/logs/train_reward/{name}.log",
    threads: placement("reward", "threads")
    resources:
        gpu=gpus("reward"),
        mem_mb=placement("reward", "mem_mb"),
        runtime=placement("reward", "runtime"),
    conda:
        "../envs/rlhf.yaml"
    shell:
        "python {ROOT:q}/scripts/train_reward.py --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | tee {log}"


rule evaluate_reward:
    message:
        "Evaluating reward model {wildcards.name}"
    input:
        unpack(inputs("evaluate_reward")),
    output:
        "output/eval/reward/{name}.manifest.json",
    params:
        placement=placement_json("reward"),
    log:
        "output/logs/evaluate_reward/{name}.log",
    threads: placement("reward", "threads")
    resources:
        gpu=gpus("reward"),
        mem_mb=placement("reward", "mem_mb"),
        runtime=placement("reward", "runtime"),
    conda:
        "../envs/rlhf.yaml"
    shell:
        "python {ROOT:q}/scripts/evaluate_reward.py --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | tee {log}"


rule reward:
    input:
        ancient("output/reward/{name}.manifest.json"),
        ancient("output/eval/reward/{name}.manifest.json"),
    output:
        directory("output/reward/{name}"),
