# Supervised fine-tuning on the chosen responses. The rules of the other stages derive from these.


rule tokenize_sft:
    input:
        unpack(inputs("tokenize_sft")),
    output:
        "output/tokens/sft/{name}.manifest.json",
    log:
        "output/logs/tokenize_sft/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("tokenize_sft")
    params:
        **params_of("tokenize_sft"),
    message:
        "Tokenizing the SFT phase for {wildcards.name}"
    shell:
        f"export RAYON_NUM_THREADS={{threads}}; {RUN}"


rule train_sft:
    input:
        unpack(inputs("train_sft")),
    output:
        "output/sft/{name}.manifest.json",
    log:
        "output/logs/train_sft/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("train_sft")
    resources:
        **resources_of("train_sft"),
    params:
        **params_of("train_sft"),
    message:
        "Fine-tuning {wildcards.name}"
    shell:
        RUN


use rule train_sft as evaluate_sft with:
    input:
        unpack(inputs("evaluate_sft")),
    output:
        "output/eval/sft/{name}.manifest.json",
    log:
        "output/logs/evaluate_sft/{name}.log",
    threads: threads_of("evaluate_sft")
    resources:
        **resources_of("evaluate_sft"),
    params:
        **params_of("evaluate_sft"),
    message:
        "Evaluating SFT model {wildcards.name}"


# The folder that users ask for. train_sft writes it: a rule without a command leaves the folder
# alone, while Snakemake deletes the old output of a rule with one before it starts.
rule sft:
    input:
        unpack(recipe_results("sft")),
        ancient("output/report/sft/{name}"),
    output:
        directory("output/sft/{name}"),
