# Reinforcement learning from scores of reward models, functions and judges, or from a teacher.


use rule job as tokenize_rlhf with:
    input:
        unpack(inputs("tokenize_rlhf")),
    output:
        "output/tokens/rlhf/{name}.manifest.json",
    log:
        "output/logs/tokenize_rlhf/{name}.log",
    message:
        "Tokenizing the RLHF prompts for {wildcards.name}"


use rule job as train_rlhf with:
    input:
        unpack(inputs("train_rlhf", tokens="output/tokens/rlhf/{name}")),
    output:
        "output/rlhf/{name}.manifest.json",
    log:
        "output/logs/train_rlhf/{name}.log",
    resources:
        **OF_PLACEMENT,
    message:
        "Training {wildcards.name} by reinforcement learning"


use rule job as evaluate_rlhf with:
    input:
        unpack(
            inputs("evaluate_rlhf", model="output/rlhf/{name}", tokens="output/tokens/rlhf/{name}")
        ),
    output:
        "output/eval/rlhf/{name}.manifest.json",
    log:
        "output/logs/evaluate_rlhf/{name}.log",
    resources:
        **OF_PLACEMENT,
    message:
        "Evaluating chat model {wildcards.name}"


rule rlhf:
    input:
        unpack(results_of("rlhf")),
        ancient("output/report/rlhf/{name}"),
    output:
        directory("output/rlhf/{name}"),
