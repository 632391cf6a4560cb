# Direct preference optimization: a chat model from pairs, without a reward model.


use rule tokenize_sft as tokenize_dpo with:
    input:
        unpack(inputs("tokenize_dpo")),
    output:
        "output/tokens/dpo/{name}.manifest.json",
    log:
        "output/logs/tokenize_dpo/{name}.log",
    threads: threads_of("tokenize_dpo")
    params:
        **params_of("tokenize_dpo"),
    message:
        "Tokenizing pairs for DPO of {wildcards.name}"


use rule train_sft as compute_reference with:
    input:
        unpack(inputs("compute_reference")),
    output:
        "output/reference/{name}.manifest.json",
    log:
        "output/logs/compute_reference/{name}.log",
    threads: threads_of("compute_reference")
    resources:
        **resources_of("compute_reference"),
    params:
        **params_of("compute_reference"),
    message:
        "Computing the reference log-probabilities for {wildcards.name}"


use rule train_sft as train_dpo with:
    input:
        unpack(inputs("train_dpo")),
    output:
        "output/dpo/{name}.manifest.json",
    log:
        "output/logs/train_dpo/{name}.log",
    threads: threads_of("train_dpo")
    resources:
        **resources_of("train_dpo"),
    params:
        **params_of("train_dpo"),
    message:
        "Training {wildcards.name} by DPO"


use rule train_sft as evaluate_dpo with:
    input:
        unpack(inputs("evaluate_dpo")),
    output:
        "output/eval/dpo/{name}.manifest.json",
    log:
        "output/logs/evaluate_dpo/{name}.log",
    threads: threads_of("evaluate_dpo")
    resources:
        **resources_of("evaluate_dpo"),
    params:
        **params_of("evaluate_dpo"),
    message:
        "Evaluating DPO model {wildcards.name}"


rule dpo:
    input:
        unpack(recipe_results("dpo")),
        ancient("output/report/dpo/{name}"),
    output:
        directory("output/dpo/{name}"),
