# Reinforcement learning from scores: of a reward model, of functions, or of both.


rule tokenize_rlhf:
    input:
        unpack(inputs("tokenize_rlhf")),
    output:
        "output/tokens/rlhf/{name}.manifest.json",
    log:
        "output/logs/tokenize_rlhf/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("rlhf")
    params:
        program=program("tokenize_phase"),
    message:
        "Tokenizing the RLHF prompts for {wildcards.name}"
    shell:
        "RAYON_NUM_THREADS={threads} python {params.program:q} --spec {input.spec}"
        " 2>&1 | (trap '' INT TERM; tee {log})"


rule train_rlhf:
    input:
        unpack(inputs("train_rlhf")),
    output:
        "output/rlhf/{name}.manifest.json",
    log:
        "output/logs/train_rlhf/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("rlhf")
    resources:
        **resources_of("rlhf"),
    params:
        program=program("train_rlhf"),
        launch=program("launch"),
        placement=placement_json("rlhf"),
    message:
        "Training {wildcards.name} by reinforcement learning"
    shell:
        "python {params.launch:q} {params.program:q} --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | (trap '' INT TERM; tee {log})"


rule evaluate_rlhf:
    input:
        unpack(inputs("evaluate_rlhf")),
    output:
        "output/eval/rlhf/{name}.manifest.json",
    log:
        "output/logs/evaluate_rlhf/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("rlhf", alone=True)
    resources:
        **resources_of("rlhf", alone=True),
    params:
        program=program("evaluate_rlhf"),
        launch=program("launch"),
        placement=placement_json("rlhf", alone=True),
    message:
        "Evaluating chat model {wildcards.name}"
    shell:
        "python {params.launch:q} {params.program:q} --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | (trap '' INT TERM; tee {log})"


rule rlhf:
    input:
        unpack(asked("rlhf", "train_rlhf", "evaluate_rlhf")),
        ancient("output/report/{name}"),
    output:
        directory("output/rlhf/{name}"),
