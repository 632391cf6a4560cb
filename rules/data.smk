# Dataset source -> records -> rows of the phases.


def local_files(name):
    """The files of a local dataset by part and path, with their content digests."""
    dataset = config["datasets"][name]
    source, found = Path(dataset["path"]), {}
    for part in ("train", "eval"):
        if part in dataset:
            paths = sorted(path for path in source.glob(dataset[part]) if path.is_file())
            if not paths:
                fail(
                    f"config: datasets.{name}.{part}: no file in {source} matches {dataset[part]!r}"
                )
            for path in paths:
                found[f"{part}/{path.relative_to(source).as_posix()}"] = digest_cache()[path]
    return found


@job("import_dataset", folder="data")
def describe_import_dataset(name):
    dataset = entry("datasets", name, "the target")
    settings = {key: value for key, value in dataset.items() if key != "path"}
    files = local_files(name) if "path" in dataset else {}
    return {"settings": {"seed": config["seed"], **settings}, "files": files}


@job("split_dataset", folder="split")
def describe_split_dataset(name):
    return {
        "settings": {"seed": config["seed"], **config["split"]},
        "inputs": {"records": ("import_dataset", name)},
    }


def phase_inputs(stage, name):
    """Records and rows of each dataset of a recipe, as inputs of its tokenize rule."""
    jobs = {}
    for dataset in recipe(stage, name)["datasets"]:
        jobs[f"records.{dataset}"] = ("import_dataset", dataset)
        jobs[f"rows.{dataset}"] = ("split_dataset", dataset)
    return jobs


def dataset_place(wildcards):
    return canonical_json({"source": config["datasets"][wildcards.name].get("path")})


rule import_dataset:
    message:
        "Importing dataset {wildcards.name}"
    input:
        unpack(inputs("import_dataset")),
    output:
        "output/data/{name}.manifest.json",
    params:
        placement=dataset_place,
    log:
        "output/logs/import_dataset/{name}.log",
    conda:
        "../envs/rlhf.yaml"
    shell:
        "python {ROOT:q}/scripts/import_dataset.py --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | tee {log}"


rule split_dataset:
    message:
        "Splitting dataset {wildcards.name} into the phases"
    input:
        unpack(inputs("split_dataset")),
    output:
        "output/split/{name}.manifest.json",
    log:
        "output/logs/split_dataset/{name}.log",
    conda:
        "../envs/rlhf.yaml"
    shell:
        "python {ROOT:q}/scripts/split_dataset.py --spec {input.spec} 2>&1 | tee {log}"
