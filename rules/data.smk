# Dataset source -> records -> row numbers of the phases.


use rule job as import_dataset with:
    input:
        unpack(inputs("import_dataset")),
    output:
        "output/data/{name}.manifest.json",
    log:
        "output/logs/import_dataset/{name}.log",
    wildcard_constraints:
        # select_responses and label_pairs make the others.
        name=f"(?!({entries_with('datasets', 'generations', 'label')})[.]manifest){RECIPE_NAME.pattern}",
    message:
        "Importing dataset {wildcards.name}"


use rule job as label_pairs with:
    input:
        unpack(inputs("label_pairs")),
    output:
        "output/data/{name}.manifest.json",
    log:
        "output/logs/label_pairs/{name}.log",
    wildcard_constraints:
        name=entries_with("datasets", "label"),
    message:
        "Labelling the pairs of dataset {wildcards.name}"


use rule job as split_dataset with:
    input:
        unpack(inputs("split_dataset")),
    output:
        "output/split/{name}.manifest.json",
    log:
        "output/logs/split_dataset/{name}.log",
    wildcard_constraints:
        name=RECIPE_NAME.pattern,
    message:
        "Splitting dataset {wildcards.name} into the phases"


# For commands of users in place of our trainers.
use rule job as render_rows with:
    input:
        unpack(inputs("render_rows")),
    output:
        "output/rows/{stage}/{name}.manifest.json",
    log:
        "output/logs/render_rows/{stage}/{name}.log",
    message:
        "Rendering the rows of {wildcards.stage}/{wildcards.name}"
