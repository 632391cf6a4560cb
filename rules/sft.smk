# Supervised fine-tuning on the chosen responses.


use rule job as tokenize_sft with:
    input:
        unpack(inputs("tokenize_sft")),
    output:
        "output/tokens/sft/{name}.manifest.json",
    log:
        "output/logs/tokenize_sft/{name}.log",
    message:
        "Tokenizing the SFT phase for {wildcards.name}"


use rule job as train_sft with:
    input:
        unpack(inputs("train_sft", tokens="output/tokens/sft/{name}")),
    output:
        "output/sft/{name}.manifest.json",
    log:
        "output/logs/train_sft/{name}.log",
    resources:
        **OF_PLACEMENT,
    message:
        "Fine-tuning {wildcards.name}"


use rule job as evaluate_sft with:
    input:
        unpack(inputs("evaluate_sft", model="output/sft/{name}", tokens="output/tokens/sft/{name}")),
    output:
        "output/eval/sft/{name}.manifest.json",
    log:
        "output/logs/evaluate_sft/{name}.log",
    resources:
        **OF_PLACEMENT,
    message:
        "Evaluating SFT model {wildcards.name}"


# The folder that users ask for. train_sft writes it: a rule without a command leaves it alone.
rule sft:
    input:
        unpack(results_of("sft")),
        ancient("output/report/sft/{name}"),
    output:
        directory("output/sft/{name}"),
