# Dataset source -> records -> row numbers of the phases.


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
        **params_of("import_dataset"),
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
        **params_of("label_pairs"),
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
        **params_of("split_dataset"),
    message:
        "Splitting dataset {wildcards.name} into the phases"
