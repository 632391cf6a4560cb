# Direct preference optimization: a chat model from pairs, without a reward model.


use rule job as tokenize_dpo with:
    input:
        unpack(inputs("tokenize_dpo")),
    output:
        "output/tokens/dpo/{name}.manifest.json",
    log:
        "output/logs/tokenize_dpo/{name}.log",
    message:
        "Tokenizing pairs for DPO of {wildcards.name}"


use rule job as compute_reference with:
    input:
        unpack(inputs("compute_reference", tokens="output/tokens/dpo/{name}")),
    output:
        "output/reference/{name}.manifest.json",
    log:
        "output/logs/compute_reference/{name}.log",
    resources:
        **OF_PLACEMENT,
    message:
        "Computing the reference log-probabilities for {wildcards.name}"


use rule job as train_dpo with:
    input:
        unpack(
            inputs(
                "train_dpo", tokens="output/tokens/dpo/{name}", reference="output/reference/{name}"
            )
        ),
    output:
        "output/dpo/{name}.manifest.json",
    log:
        "output/logs/train_dpo/{name}.log",
    resources:
        **OF_PLACEMENT,
    message:
        "Training {wildcards.name} by DPO"


use rule job as evaluate_dpo with:
    input:
        unpack(inputs("evaluate_dpo", model="output/dpo/{name}", tokens="output/tokens/dpo/{name}")),
    output:
        "output/eval/dpo/{name}.manifest.json",
    log:
        "output/logs/evaluate_dpo/{name}.log",
    resources:
        **OF_PLACEMENT,
    message:
        "Evaluating DPO model {wildcards.name}"


rule dpo:
    input:
        unpack(results_of("dpo")),
        ancient("output/report/dpo/{name}"),
    output:
        directory("output/dpo/{name}"),
