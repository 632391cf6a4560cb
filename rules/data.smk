# Dataset source -> records -> row numbers of the phases.


SPECS.describe(
    "import_dataset",
    folder="data",
    settings=lambda name: import_settings(CONFIG, name),
    files=lambda name: dataset_files(CONFIG, name),
)
SPECS.describe(
    "split_dataset",
    folder="split",
    settings=lambda name: split_settings(CONFIG, name),
    inputs=lambda name: {"records": CONFIG.records_job(name)},
)


rule import_dataset:
    input:
        unpack(inputs("import_dataset")),
    output:
        "output/data/{name}.manifest.json",
    log:
        "output/logs/import_dataset/{name}.log",
    wildcard_constraints:
        # select_responses makes the others.
        name=f"(?!({entries_with('datasets', 'generations')})[.]manifest){RECIPE_NAME.pattern}",
    conda:
        "../envs/snakechat.yaml"
    params:
        program=program("import_dataset"),
        placement=source_json(dataset_folder),
    message:
        "Importing dataset {wildcards.name}"
    shell:
        RUN


use rule import_dataset as split_dataset with:
    input:
        unpack(inputs("split_dataset")),
    output:
        "output/split/{name}.manifest.json",
    log:
        "output/logs/split_dataset/{name}.log",
    wildcard_constraints:
        name=RECIPE_NAME.pattern,
    params:
        program=program("split_dataset"),
        placement=CACHE_JSON,
    message:
        "Splitting dataset {wildcards.name} into the phases"
