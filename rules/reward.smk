# The reward model, trained on chosen and rejected responses to the same prompt.


rule tokenize_reward:
    input:
        unpack(inputs("tokenize_reward")),
    output:
        "output/tokens/reward/{name}.manifest.json",
    log:
        "output/logs/tokenize_reward/{name}.log",
    conda:
        "../envs/rlhf.yaml"
    threads: placement("reward", "threads")
    params:
        program=program("tokenize_reward"),
    message:
        "Tokenizing the reward phase for {wildcards.name}"
    shell:
        "RAYON_NUM_THREADS={threads} python {params.program:q} --spec {input.spec}"
        " 2>&1 | (trap '' INT TERM; tee {log})"


rule train_reward:
    input:
        unpack(inputs("train_reward")),
    output:
        "output/reward/{name}.manifest.json",
    log:
        "output/logs/train_reward/{name}.log",
    conda:
        "../envs/rlhf.yaml"
    threads: placement("reward", "threads")
    resources:
        gpu=gpus("reward"),
        mem_mb=placement("reward", "mem_mb"),
        runtime=placement("reward", "runtime"),
    params:
        launch=launch("reward"),
        program=program("train_reward"),
        placement=placement_json("reward"),
    message:
        "Training reward model {wildcards.name}"
    shell:
        "{params.launch} {params.program:q} --spec {input.spec} --placement {params.placement:q}"
        " 2>&1 | (trap '' INT TERM; tee {log})"


rule evaluate_reward:
    input:
        unpack(inputs("evaluate_reward")),
    output:
        "output/eval/reward/{name}.manifest.json",
    log:
        "output/logs/evaluate_reward/{name}.log",
    conda:
        "../envs/rlhf.yaml"
    threads: placement("reward", "threads")
    resources:
        gpu=gpus("reward"),
        mem_mb=placement("reward", "mem_mb"),
        runtime=placement("reward", "runtime"),
    params:
        program=program("evaluate_reward"),
        placement=placement_json("reward"),
    message:
        "Evaluating reward model {wildcards.name}"
    shell:
        "python {params.program:q} --spec {input.spec} --placement {params.placement:q}"
        " 2>&1 | (trap '' INT TERM; tee {log})"


rule reward:
    input:
        unpack(asked("reward", "train_reward", "evaluate_reward")),
    output:
        directory("output/reward/{name}"),
