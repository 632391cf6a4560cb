# Supervised fine-tuning on the chosen responses.


@job("tokenize_sft", folder="tokens/sft")
def describe_tokenize_sft(name):
    settings = recipe("sft", name)
    return {
        "settings": {key: settings[key] for key in ("datasets", "max_length")},
        "inputs": {"tokenizer": tokenizer_model("sft", name), **phase_inputs("sft", name)},
    }


@job("train_sft", folder="sft")
def describe_train_sft(name):
    return {
        "settings": science(recipe("sft", name)),
        "inputs": {"model": base_model("sft", name), "tokens": ("tokenize_sft", name)},
    }


@job("evaluate_sft", folder="eval/sft")
def describe_evaluate_sft(name):
    return {
        "settings": {},
        "inputs": {
            "base": base_model("sft", name),
            "model": ("train_sft", name),
            "tokens": ("tokenize_sft", name),
        },
    }


rule tokenize_sft:
    message:
        "Tokenizing the SFT phase for {wildcards.name}"
    input:
        unpack(inputs("tokenize_sft")),
    output:
        "output/tokens/sft/{name}.manifest.json",
    log:
        "output/logs/tokenize_sft/{name}.log",
    conda:
        "../envs/rlhf.yaml"
    shell:
        "python {ROOT:q}/scripts/tokenize_sft.py --spec {input.spec} 2>&1 | tee {log}"


rule train_sft:
    message:
        "Fine-tuning {wildcards.name}"
    input:
        unpack(inputs("train_sft")),
    output:
        "output/sft/{name}.manifest.json",
    params:
        placement=placement_json("sft"),
    log:
        "output/logs/train_sft/{name}.log",
    threads: placement("sft", "threads")
    resources:
        gpu=gpus("sft"),
        mem_mb=placement("sft", "mem_mb"),
        runtime=placement("sft", "runtime"),
    conda:
        "../envs/rlhf.yaml"
    shell:
        "python {ROOT:q}/scripts/train_sft.py --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | tee {log}"


rule evaluate_sft:
    message:
        "Evaluating SFT model {wildcards.name}"
    input:
        unpack(inputs("evaluate_sft")),
    output:
        "output/eval/sft/{name}.manifest.json",
    params:
        placement=placement_json("sft"),
    log:
        "output/logs/evaluate_sft/{name}.log",
    threads: placement("sft", "threads")
    resources:
        gpu=gpus("sft"),
        mem_mb=placement("sft", "mem_mb"),
        runtime=placement("sft", "runtime"),
    conda:
        "../envs/rlhf.yaml"
    shell:
        "python {ROOT:q}/scripts/evaluate_sft.py --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | tee {log}"


# The folder that users ask for. Its files were put there by train_sft: a rule without a command
# leaves the folder alone, where a rule with one would have Snakemake delete the old result first.
rule sft:
    input:
        ancient("output/sft/{name}.manifest.json"),
        ancient("output/eval/sft/{name}.manifest.json"),
    output:
        directory("output/sft/{name}"),
