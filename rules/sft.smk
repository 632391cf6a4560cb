# Supervised fine-tuning on the chosen responses.


rule tokenize_sft:
    input:
        unpack(inputs("tokenize_sft")),
    output:
        "output/tokens/sft/{name}.manifest.json",
    log:
        "output/logs/tokenize_sft/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("sft")
    params:
        program=program("tokenize_phase"),
    message:
        "Tokenizing the SFT phase for {wildcards.name}"
    shell:
        "RAYON_NUM_THREADS={threads} python {params.program:q} --spec {input.spec}"
        " 2>&1 | (trap '' INT TERM; tee {log})"


rule train_sft:
    input:
        unpack(inputs("train_sft")),
    output:
        "output/sft/{name}.manifest.json",
    log:
        "output/logs/train_sft/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("sft")
    resources:
        **resources_of("sft"),
    params:
        program=program("train_sft"),
        launch=program("launch"),
        placement=placement_json("sft"),
    message:
        "Fine-tuning {wildcards.name}"
    shell:
        "python {params.launch:q} {params.program:q} --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | (trap '' INT TERM; tee {log})"


rule evaluate_sft:
    input:
        unpack(inputs("evaluate_sft")),
    output:
        "output/eval/sft/{name}.manifest.json",
    log:
        "output/logs/evaluate_sft/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("sft", alone=True)
    resources:
        **resources_of("sft", alone=True),
    params:
        program=program("evaluate_sft"),
        launch=program("launch"),
        placement=placement_json("sft", alone=True),
    message:
        "Evaluating SFT model {wildcards.name}"
    shell:
        "python {params.launch:q} {params.program:q} --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | (trap '' INT TERM; tee {log})"


# The folder that users ask for. Its files were put there by train_sft: a rule without a command
# leaves the folder alone, where a rule with one would have Snakemake delete the old result first.
rule sft:
    input:
        unpack(asked("sft", "train_sft", "evaluate_sft")),
    output:
        directory("output/sft/{name}"),
