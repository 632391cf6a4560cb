# Direct preference optimisation: a chat model from pairs, without a reward model.


rule tokenize_dpo:
    input:
        unpack(inputs("tokenize_dpo")),
    output:
        "output/tokens/dpo/{name}.manifest.json",
    log:
        "output/logs/tokenize_dpo/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("dpo")
    params:
        program=program("tokenize_phase"),
    message:
        "Tokenizing pairs for DPO of {wildcards.name}"
    shell:
        "RAYON_NUM_THREADS={threads} python {params.program:q} --spec {input.spec}"
        " 2>&1 | (trap '' INT TERM; tee {log})"


rule reference_dpo:
    input:
        unpack(inputs("reference_dpo")),
    output:
        "output/reference/{name}.manifest.json",
    log:
        "output/logs/reference_dpo/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("dpo", alone=True)
    resources:
        **resources_of("dpo", alone=True),
    params:
        program=program("reference_dpo"),
        launch=program("launch"),
        placement=placement_json("dpo", alone=True),
    message:
        "Taking the reference's log-probabilities for {wildcards.name}"
    shell:
        "python {params.launch:q} {params.program:q} --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | (trap '' INT TERM; tee {log})"


rule train_dpo:
    input:
        unpack(inputs("train_dpo")),
    output:
        "output/dpo/{name}.manifest.json",
    log:
        "output/logs/train_dpo/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("dpo")
    resources:
        **resources_of("dpo"),
    params:
        program=program("train_dpo"),
        launch=program("launch"),
        placement=placement_json("dpo"),
    message:
        "Training {wildcards.name} by DPO"
    shell:
        "python {params.launch:q} {params.program:q} --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | (trap '' INT TERM; tee {log})"


rule evaluate_dpo:
    input:
        unpack(inputs("evaluate_dpo")),
    output:
        "output/eval/dpo/{name}.manifest.json",
    log:
        "output/logs/evaluate_dpo/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("dpo", alone=True)
    resources:
        **resources_of("dpo", alone=True),
    params:
        program=program("evaluate_dpo"),
        launch=program("launch"),
        placement=placement_json("dpo", alone=True),
    message:
        "Evaluating DPO model {wildcards.name}"
    shell:
        "python {params.launch:q} {params.program:q} --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | (trap '' INT TERM; tee {log})"


rule dpo:
    input:
        unpack(asked("dpo", "train_dpo", "evaluate_dpo")),
    output:
        directory("output/dpo/{name}"),
