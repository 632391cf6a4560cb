# Dataset source -> records -> row numbers of the phases.


SPECS.describe(
    "import_dataset",
    folder="data",
    settings=lambda name: import_settings(CONFIG, name),
    files=lambda name: dataset_files(CONFIG, name),
)
SPECS.describe(
    "label_pairs",
    folder="data",
    settings=lambda name: labelling_settings(CONFIG, name),
    inputs=lambda name: labelling_inputs(CONFIG, name),
    files=lambda name: excluded_files(CONFIG, CONFIG.labelled_dataset(name)),
)
SPECS.describe(
    "split_dataset",
    folder="split",
    settings=lambda name: split_settings(CONFIG, name),
    inputs=lambda name: split_inputs(CONFIG, name),
    files=lambda name: excluded_files(CONFIG, name),
)


rule import_dataset:
    input:
        unpack(inputs("import_dataset")),
    output:
        "output/data/{name}.manifest.json",
    log:
        "output/logs/import_dataset/{name}.log",
    wildcard_constraints:
        # select_responses and label_pairs make the others.
        name=f"(?!({entries_with('datasets', 'generations', 'label')})[.]manifest){RECIPE_NAME.pattern}",
    conda:
        "../envs/snakechat.yaml"
    params:
        spec=spec_file,
        program=program("import_dataset"),
        placement=source_json("datasets", dataset_folder),
    message:
        "Importing dataset {wildcards.name}"
    shell:
        RUN


use rule import_dataset as label_pairs with:
    input:
        unpack(inputs("label_pairs")),
    log:
        "output/logs/label_pairs/{name}.log",
    wildcard_constraints:
        name=entries_with("datasets", "label"),
    params:
        spec=spec_file,
        program=program("label_pairs"),
        placement=labelling_json,
    message:
        "Labelling the pairs of dataset {wildcards.name}"


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
        spec=spec_file,
        program=program("split_dataset"),
        placement=splitting_json,
    message:
        "Splitting dataset {wildcards.name} into the phases"
