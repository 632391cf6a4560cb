# The reward model, trained on chosen and rejected responses to the same prompt.


use rule tokenize_sft as tokenize_reward with:
    input:
        unpack(inputs("tokenize_reward")),
    output:
        "output/tokens/reward/{name}.manifest.json",
    log:
        "output/logs/tokenize_reward/{name}.log",
    threads: threads_of("tokenize_reward")
    params:
        **params_of("tokenize_reward"),
    message:
        "Tokenizing the reward phase for {wildcards.name}"


use rule train_sft as train_reward with:
    input:
        unpack(inputs("train_reward")),
    output:
        "output/reward/{name}.manifest.json",
    log:
        "output/logs/train_reward/{name}.log",
    threads: threads_of("train_reward")
    resources:
        **resources_of("train_reward"),
    params:
        **params_of("train_reward"),
    message:
        "Training reward model {wildcards.name}"


use rule train_sft as evaluate_reward with:
    input:
        unpack(inputs("evaluate_reward")),
    output:
        "output/eval/reward/{name}.manifest.json",
    log:
        "output/logs/evaluate_reward/{name}.log",
    threads: threads_of("evaluate_reward")
    resources:
        **resources_of("evaluate_reward"),
    params:
        **params_of("evaluate_reward"),
    message:
        "Evaluating reward model {wildcards.name}"


rule reward:
    input:
        unpack(recipe_results("reward")),
        ancient("output/report/reward/{name}"),
    output:
        directory("output/reward/{name}"),
