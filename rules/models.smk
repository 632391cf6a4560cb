# Base models: fetched from the hub or a local folder, or initialized from a config.


SPECS.describe(
    "fetch_model",
    folder="models",
    settings=lambda name: model_settings(CONFIG, name),
    files=lambda name: base_model_files(CONFIG, name),
)
SPECS.describe(
    "init_model",
    folder="models",
    settings=lambda name: model_settings(CONFIG, name),
    inputs=lambda name: tokenizer_inputs(CONFIG, name),
    files=lambda name: tokenizer_files(CONFIG, name),
)


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
        spec=spec_file,
        program=program("fetch_model"),
        placement=source_json("models", model_folder),
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
        spec=spec_file,
        program=program("init_model"),
        placement=initialization_json,
    message:
        "Initializing model {wildcards.name} from its config"
    shell:
        RUN
