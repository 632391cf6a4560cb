# Reinforcement learning from scores of a reward model, of functions, or of both.


use rule tokenize_sft as tokenize_rlhf with:
    input:
        unpack(inputs("tokenize_rlhf")),
    output:
        "output/tokens/rlhf/{name}.manifest.json",
    log:
        "output/logs/tokenize_rlhf/{name}.log",
    threads: threads_of("tokenize_rlhf")
    params:
        **params_of("tokenize_rlhf"),
    message:
        "Tokenizing the RLHF prompts for {wildcards.name}"


use rule train_sft as train_rlhf with:
    input:
        unpack(inputs("train_rlhf")),
    output:
        "output/rlhf/{name}.manifest.json",
    log:
        "output/logs/train_rlhf/{name}.log",
    threads: threads_of("train_rlhf")
    resources:
        **resources_of("train_rlhf"),
    params:
        **params_of("train_rlhf"),
    message:
        "Training {wildcards.name} by reinforcement learning"


use rule train_sft as evaluate_rlhf with:
    input:
        unpack(inputs("evaluate_rlhf")),
    output:
        "output/eval/rlhf/{name}.manifest.json",
    log:
        "output/logs/evaluate_rlhf/{name}.log",
    threads: threads_of("evaluate_rlhf")
    resources:
        **resources_of("evaluate_rlhf"),
    params:
        **params_of("evaluate_rlhf"),
    message:
        "Evaluating chat model {wildcards.name}"


rule rlhf:
    input:
        unpack(recipe_results("rlhf")),
        ancient("output/report/rlhf/{name}"),
    output:
        directory("output/rlhf/{name}"),
