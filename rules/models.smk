# Base models: fetched from the hub or a local folder, or initialized from a config.


rule fetch_model:
    input:
        unpack(inputs("fetch_model")),
    output:
        "output/models/{name}.manifest.json",
    log:
        "output/logs/fetch_model/{name}.log",
    wildcard_constraints:
        name=entries_with("models", "hub", "path"),
    conda:
        "../envs/snakechat.yaml"
    resources:
        # The weights are copied without loading them.
        mem_mb=lambda wildcards, attempt: 4000 * attempt,
    params:
        **params_of("fetch_model"),
    message:
        "Fetching model {wildcards.name}"
    shell:
        RUN


rule init_model:
    input:
        unpack(inputs("init_model")),
    output:
        "output/models/{name}.manifest.json",
    log:
        "output/logs/init_model/{name}.log",
    wildcard_constraints:
        name=entries_with("models", "init"),
    conda:
        "../envs/snakechat.yaml"
    params:
        **params_of("init_model"),
    message:
        "Initializing model {wildcards.name} from its config"
    shell:
        RUN
