# Base models: fetched from the hub or a local folder, or made from a config with random weights.


rule fetch_model:
    input:
        unpack(inputs("fetch_model")),
    output:
        "output/models/{name}.manifest.json",
    log:
        "output/logs/fetch_model/{name}.log",
    wildcard_constraints:
        name=models_from("hub", "path"),
    conda:
        "../envs/rlhf.yaml"
    params:
        program=program("fetch_model"),
        placement=model_place,
    message:
        "Fetching model {wildcards.name}"
    shell:
        "python {params.program:q} --spec {input.spec} --placement {params.placement:q}"
        " 2>&1 | (trap '' INT TERM; tee {log})"


rule init_model:
    input:
        unpack(inputs("init_model")),
    output:
        "output/models/{name}.manifest.json",
    log:
        "output/logs/init_model/{name}.log",
    wildcard_constraints:
        name=models_from("init"),
    conda:
        "../envs/rlhf.yaml"
    params:
        program=program("init_model"),
        placement=tokenizer_place,
    message:
        "Making model {wildcards.name} from its config"
    shell:
        "python {params.program:q} --spec {input.spec} --placement {params.placement:q}"
        " 2>&1 | (trap '' INT TERM; tee {log})"
