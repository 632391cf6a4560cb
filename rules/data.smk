# Dataset source -> records -> rows of the phases.


rule import_dataset:
    input:
        unpack(inputs("import_dataset")),
    output:
        "output/data/{name}.manifest.json",
    log:
        "output/logs/import_dataset/{name}.log",
    conda:
        "../envs/rlhf.yaml"
    params:
        program=program("import_dataset"),
        placement=dataset_place,
    message:
        "Importing dataset {wildcards.name}"
    shell:
        "python {params.program:q} --spec {input.spec} --placement {params.placement:q}"
        " 2>&1 | (trap '' INT TERM; tee {log})"


rule split_dataset:
    input:
        unpack(inputs("split_dataset")),
    output:
        "output/split/{name}.manifest.json",
    log:
        "output/logs/split_dataset/{name}.log",
    conda:
        "../envs/rlhf.yaml"
    params:
        program=program("split_dataset"),
    message:
        "Splitting dataset {wildcards.name} into the phases"
    shell:
        "python {params.program:q} --spec {input.spec}" " 2>&1 | (trap '' INT TERM; tee {log})"
