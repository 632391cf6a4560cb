# The reward model, trained on chosen and rejected responses to the same prompt.


use rule job as tokenize_reward with:
    input:
        unpack(inputs("tokenize_reward")),
    output:
        "output/tokens/reward/{name}.manifest.json",
    log:
        "output/logs/tokenize_reward/{name}.log",
    message:
        "Tokenizing the reward phase for {wildcards.name}"


use rule job as train_reward with:
    input:
        unpack(inputs("train_reward", tokens="output/tokens/reward/{name}")),
    output:
        "output/reward/{name}.manifest.json",
    log:
        "output/logs/train_reward/{name}.log",
    resources:
        **OF_PLACEMENT,
    message:
        "Training reward model {wildcards.name}"


use rule job as evaluate_reward with:
    input:
        unpack(
            inputs(
                "evaluate_reward",
                model="output/reward/{name}",
                tokens="output/tokens/reward/{name}",
            )
        ),
    output:
        "output/eval/reward/{name}.manifest.json",
    log:
        "output/logs/evaluate_reward/{name}.log",
    resources:
        **OF_PLACEMENT,
    message:
        "Evaluating reward model {wildcards.name}"


rule reward:
    input:
        unpack(results_of("reward")),
        ancient("output/report/reward/{name}"),
    output:
        directory("output/reward/{name}"),
