# Base models: fetched from the hub, or made from a config with random weights.


def models_from(origin):
    """Constraint on names: the models that come from this origin."""
    return "|".join(re.escape(n) for n, m in config["models"].items() if origin in m) or "(?!)"


@job("fetch_model", folder="models")
def describe_fetch_model(name):
    return {"settings": config["models"][name]}


@job("init_model", folder="models")
def describe_init_model(name):
    model = config["models"][name]
    tokenizer = {key: value for key, value in model["tokenizer"].items() if key != "path"}
    described = {"settings": {"seed": config["seed"], "init": model["init"], "tokenizer": tokenizer}}
    if "train_on" in tokenizer:
        described["inputs"] = {"records": ("import_dataset", tokenizer["train_on"])}
    else:
        source = Path(model["tokenizer"]["path"])
        paths = sorted(source.glob("*.json")) + sorted(source.glob("*.txt"))
        if not paths:
            fail(f"config: models.{name}.tokenizer.path: {source} has no tokenizer files")
        described["files"] = {path.name: digest_cache()[path] for path in paths}
    return described


def tokenizer_place(wildcards):
    return canonical_json({"source": config["models"][wildcards.name]["tokenizer"].get("path")})


rule fetch_model:
    message:
        "Fetching model {wildcards.name} from the hub"
    wildcard_constraints:
        name=models_from("hub"),
    input:
        unpack(inputs("fetch_model")),
    output:
        "output/models/{name}.manifest.json",
    log:
        "output/logs/fetch_model/{name}.log",
    conda:
        "../envs/rlhf.yaml"
    shell:
        "python {ROOT:q}/scripts/fetch_model.py --spec {input.spec} 2>&1 | tee {log}"


rule init_model:
    message:
        "Making model {wildcards.name} from its config"
    wildcard_constraints:
        name=models_from("init"),
    input:
        unpack(inputs("init_model")),
    output:
        "output/models/{name}.manifest.json",
    params:
        placement=tokenizer_place,
    log:
        "output/logs/init_model/{name}.log",
    conda:
        "../envs/rlhf.yaml"
    shell:
        "python {ROOT:q}/scripts/init_model.py --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | tee {log}"
