# The reward model, trained on chosen and rejected responses to the same prompt.


rule tokenize_reward:
    input:
        unpack(inputs("tokenize_reward")),
    output:
        "output/tokens/reward/{name}.manifest.json",
    log:
        "output/logs/tokenize_reward/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("reward")
    params:
        program=program("tokenize_phase"),
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
        "../envs/snakechat.yaml"
    threads: threads_of("reward")
    resources:
        **resources_of("reward"),
    params:
        program=program("train_reward"),
        launch=program("launch"),
        placement=placement_json("reward"),
    message:
        "Training reward model {wildcards.name}"
    shell:
        "python {params.launch:q} {params.program:q} --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | (trap '' INT TERM; tee {log})"


rule evaluate_reward:
    input:
        unpack(inputs("evaluate_reward")),
    output:
        "output/eval/reward/{name}.manifest.json",
    log:
        "output/logs/evaluate_reward/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("reward", alone=True)
    resources:
        **resources_of("reward", alone=True),
    params:
        program=program("evaluate_reward"),
        launch=program("launch"),
        placement=placement_json("reward", alone=True),
    message:
        "Evaluating reward model {wildcards.name}"
    shell:
        "python {params.launch:q} {params.program:q} --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | (trap '' INT TERM; tee {log})"


rule reward:
    input:
        unpack(asked("reward", "train_reward", "evaluate_reward")),
    output:
        directory("output/reward/{name}"),
