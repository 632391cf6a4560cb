# The jobs, in the order of the road: what determines the result of each, for its spec (specs.smk).

from snakechat.workflow.errors import InputError
from snakechat.data.model_files import model_files
from snakechat.data.dataset_files import local_paths, split_files


def science(stage, name):
    """Settings without their placement: what a training program needs to know."""
    settings = {**recipe(stage, name), "datasets": blend(stage, name)}
    del settings["placement"]
    if stage != "rlhf":
        # Of the trained model; the actor has its own.
        settings["template"] = template(stage, name)
    # They count in evaluation alone.
    for key in ("judge", "compare_with"):
        settings.pop(key, None)
    return settings


def local_files(name):
    """The files of a local dataset by part and path, with their content digests."""
    dataset, source = config["datasets"][name], source_of(name)
    if source.is_file():
        return {f"train/{source.name}": digest_cache()[source]}
    if not source.is_dir():
        fail(f"config: datasets.{name}.path: there is no {source}")
    globs = {part: dataset[part] for part in ("train", "eval") if part in dataset}
    try:
        parts = split_files(local_paths(source), globs)
    except InputError as error:
        fail(f"config: datasets.{name}: {source}: {error}")
    found = [(part, path) for part, paths in parts.items() for path in paths]
    for _, path in found:
        if not (source / path).exists():
            fail(f"config: datasets.{name}: {source / path} is a link to nothing")
    return {f"{part}/{path}": digest_cache()[source / path] for part, path in found}


@job("import_dataset", folder="data")
def describe_import_dataset(name):
    dataset = entry("datasets", name, "the target")
    if "generate" in dataset:
        settings = {key: dataset[key] for key in ("generate", "rows", "eval_rows")}
        return {"settings": {"seed": dataset.get("seed", config["seed"]), **settings}}
    keys = ["format", "remove", "on_bad_row"]
    if "path" not in dataset:
        keys += ["hub", "revision", "train", "eval"]
    settings = {"on_bad_row": config["on_bad_row"]}
    settings |= {key: dataset[key] for key in keys if key in dataset}
    settings["columns"] = columns_of(dataset["format"], dataset.get("columns"))
    return {"settings": settings, "files": local_files(name) if "path" in dataset else {}}


@job("split_dataset", folder="split")
def describe_split_dataset(name):
    return {
        "settings": {
            "seed": config["seed"],
            "weights": split_weights(name),
            "by": config["split"]["by"],
            "max_rows": config["datasets"][name].get("max_rows"),
        },
        "inputs": {"records": ("import_dataset", name)},
    }


def tokenize_settings(stage, name, *keys):
    """What a tokenize program needs to know."""
    settings = recipe(stage, name)
    return {
        "seed": settings["seed"],
        "datasets": blend(stage, name),
        "template": template(stage, name),
        **{key: settings[key] for key in keys},
    }


def phase_inputs(stage, name):
    """Records and rows of each dataset of a recipe, as inputs of its tokenize rule."""
    jobs = {}
    for dataset, _ in blend(stage, name):
        jobs[f"records.{dataset}"] = ("import_dataset", dataset)
        jobs[f"rows.{dataset}"] = ("split_dataset", dataset)
    return jobs


@job("fetch_model", folder="models")
def describe_fetch_model(name):
    model = config["models"][name]
    if "path" in model:
        return {"settings": {}, "files": local_model(name, local_path(model["path"]))}
    return {"settings": {key: model[key] for key in ("hub", "revision")}}


def local_model(name, source):
    """The files of a base model in a folder, with their content digests."""
    if not source.is_dir():
        fail(f"config: models.{name}.path: there is no folder {source}")
    files = model_files(sorted(path.name for path in source.iterdir() if path.is_file()))
    if not any(file.endswith((".safetensors", ".bin")) for file in files):
        fail(f"config: models.{name}.path: {source} has no *.safetensors and no pytorch_model*.bin")
    return {file: digest_cache()[source / file] for file in files}


@job("init_model", folder="models")
def describe_init_model(name):
    model = config["models"][name]
    tokenizer = {key: value for key, value in model["tokenizer"].items() if key != "path"}
    described = {
        "settings": {"seed": config["seed"], "init": model["init"], "tokenizer": tokenizer}
    }
    if "train_on" in tokenizer:
        described["inputs"] = {"records": ("import_dataset", tokenizer["train_on"])}
    else:
        source = local_path(model["tokenizer"]["path"])
        paths = sorted(
            path for kind in ("json", "txt", "jinja") for path in source.glob(f"*.{kind}")
        )
        if not paths:
            fail(f"config: models.{name}.tokenizer.path: {source} has no tokenizer files")
        described["files"] = {path.name: digest_cache()[path] for path in paths}
    return described


@job("tokenize_sft", folder="tokens/sft")
def describe_tokenize_sft(name):
    return {
        "settings": tokenize_settings("sft", name, "max_length", "truncation_side"),
        "inputs": {"tokenizer": tokenizer_model("sft", name), **phase_inputs("sft", name)},
    }


@job("train_sft", folder="sft")
def describe_train_sft(name):
    return {
        "settings": science("sft", name),
        "inputs": {"model": base_model("sft", name), "tokens": ("tokenize_sft", name)},
    }


@job("evaluate_sft", folder="eval/sft")
def describe_evaluate_sft(name):
    return {
        "settings": {"dtype": recipe("sft", name)["dtype"]},
        "inputs": {
            "base": base_model("sft", name),
            "model": ("train_sft", name),
            "tokens": ("tokenize_sft", name),
        },
    }


@job("tokenize_reward", folder="tokens/reward")
def describe_tokenize_reward(name):
    return {
        "settings": tokenize_settings("reward", name, "max_length", "truncation_side"),
        "inputs": {"tokenizer": tokenizer_model("reward", name), **phase_inputs("reward", name)},
    }


@job("train_reward", folder="reward")
def describe_train_reward(name):
    return {
        "settings": science("reward", name),
        "inputs": {"model": base_model("reward", name), "tokens": ("tokenize_reward", name)},
    }


@job("evaluate_reward", folder="eval/reward")
def describe_evaluate_reward(name):
    return {
        "settings": {"datasets": [dataset for dataset, _ in blend("reward", name)]},
        "inputs": {
            "model": ("train_reward", name),
            "tokens": ("tokenize_reward", name),
        },
    }


@job("tokenize_dpo", folder="tokens/dpo")
def describe_tokenize_dpo(name):
    return {
        "settings": tokenize_settings("dpo", name, "max_length", "truncation_side"),
        "inputs": {"tokenizer": tokenizer_model("dpo", name), **phase_inputs("dpo", name)},
    }


@job("reference_dpo", folder="reference")
def describe_reference_dpo(name):
    return {
        "settings": {"dtype": recipe("dpo", name)["dtype"]},
        "inputs": {"model": base_model("dpo", name), "tokens": ("tokenize_dpo", name)},
    }


@job("train_dpo", folder="dpo")
def describe_train_dpo(name):
    return {
        "settings": science("dpo", name),
        "inputs": {
            "model": base_model("dpo", name),
            "tokens": ("tokenize_dpo", name),
            "reference": ("reference_dpo", name),
        },
    }


@job("evaluate_dpo", folder="eval/dpo")
def describe_evaluate_dpo(name):
    settings = recipe("dpo", name)
    return {
        "settings": {
            "datasets": [dataset for dataset, _ in blend("dpo", name)],
            **{key: settings[key] for key in ("dtype", "beta", "label_smoothing")},
        },
        "inputs": {
            "model": ("train_dpo", name),
            "tokens": ("tokenize_dpo", name),
            "reference": ("reference_dpo", name),
        },
    }


@job("tokenize_rlhf", folder="tokens/rlhf")
def describe_tokenize_rlhf(name):
    return {
        "settings": tokenize_settings("rlhf", name, "max_prompt_length"),
        "inputs": {"tokenizer": tokenizer_model("rlhf", name), **phase_inputs("rlhf", name)},
    }


@job("train_rlhf", folder="rlhf")
def describe_train_rlhf(name):
    actor, reward, ptx = (recipe("rlhf", name)[key] for key in ("actor", "reward", "ptx"))
    inputs = {
        "actor": ("train_sft", actor),
        "tokens": ("tokenize_rlhf", name),
        "tokens.sft": ("tokenize_sft", actor),
    }
    if reward is not None:
        inputs |= {"reward": ("train_reward", reward), "tokens.reward": ("tokenize_reward", reward)}
    if ptx is not None:
        inputs["ptx"] = ("tokenize_sft", ptx)
    return {"settings": science("rlhf", name), "inputs": inputs}


def exact_check(name):
    """The generator of a recipe's only dataset, which can tell right responses exactly, or None."""
    datasets = blend("rlhf", name)
    return config["datasets"][datasets[0][0]].get("generate") if len(datasets) == 1 else None


def trained(model):
    """The job that trains STAGE/RECIPE."""
    stage, _, name = model.partition("/")
    return f"train_{stage}", name


def models_of(stage, name):
    """The jobs of a recipe's model and of those before it, by what they are called beside it."""
    if stage == "rlhf":
        settings = recipe("rlhf", name)
        before = models_of("sft", settings["actor"])
        before |= {f"compare_with.{other}": trained(other) for other in settings["compare_with"]}
    else:
        made_by, origin = base_model(stage, name)
        before = models_of("sft", origin) if made_by == "train_sft" else {"base": (made_by, origin)}
    return {**before, stage: (f"train_{stage}", name)}


@job("evaluate_rlhf", folder="eval/rlhf")
def describe_evaluate_rlhf(name):
    settings = recipe("rlhf", name)
    keys = ("seed", "dtype", "max_response_length", "reward_functions")
    scorers = {key: settings[key] for key in ("reward", "judge") if settings[key] is not None}
    return {
        "settings": {
            **{key: settings[key] for key in keys},
            "exact_check": exact_check(name),
            **config["evaluation"],
        },
        "inputs": {
            **models_of("rlhf", name),
            **{key: ("train_reward", scorer) for key, scorer in scorers.items()},
            "tokens": ("tokenize_rlhf", name),
        },
    }


@job("draw_report", folder="report")
def describe_draw_report(name):
    settings = recipe("rlhf", name)
    recipes = {"sft": settings["actor"], "reward": settings["reward"], "rlhf": name}
    recipes = {stage: name for stage, name in recipes.items() if name is not None}
    datasets = {dataset for stage, name in recipes.items() for dataset, _ in blend(stage, name)}
    return {
        "settings": {},
        "inputs": {
            **{f"records.{dataset}": ("import_dataset", dataset) for dataset in sorted(datasets)},
            **{f"rows.{dataset}": ("split_dataset", dataset) for dataset in sorted(datasets)},
            **{f"tokens.{stage}": (f"tokenize_{stage}", name) for stage, name in recipes.items()},
            **{
                f"{verb}_{stage}": (f"{verb}_{stage}", name)
                for stage, name in recipes.items()
                for verb in ("train", "evaluate")
            },
        },
    }


# A look at responses.


def prompt_sets(stage, name):
    """Sets of prompts for the base model behind a recipe: its own, or those of all."""
    _, model = tokenizer_model(stage, name)
    return config["models"][model].get("prompts", config["prompts"])


def prompt_files(folder, sets):
    """The files of sets of prompts in a folder of ours, with their content digests."""
    there = sorted(path.stem for path in (ROOT / folder).glob("*.yaml"))
    for name in sets:
        if name not in there:
            known = ", ".join(there) or "none"
            fail(f"config: prompts names {name!r}; {folder} has no {name}.yaml (there: {known})")
    paths = [f"{folder}/{name}.yaml" for name in sets]
    return {path: digest_cache()[ROOT / path] for path in paths}


def look_settings(stage, name):
    """What a program needs to know that shows responses to prompts of users."""
    return {
        "prompts": prompt_sets(stage, name),
        "template": template(stage, name),
        "language": config["language"],
    }


@job("prompt_eval", folder="prompt_eval")
def describe_prompt_eval(name):
    stage, _, recipe_name = name.partition("/")
    settings = recipe(stage, recipe_name)
    look = look_settings(stage, recipe_name)
    return {
        "settings": {
            **{key: settings[key] for key in ("seed", "dtype")},
            **look,
            **config["prompt_eval"],
        },
        "inputs": models_of(stage, recipe_name),
        "files": prompt_files("prompts", look["prompts"]),
    }


@job("rw_eval", folder="rw_eval/reward")
def describe_rw_eval(name):
    look = look_settings("reward", name)
    return {
        "settings": look,
        "inputs": {"model": ("train_reward", name)},
        "files": prompt_files("prompts/pairs", look["prompts"]),
    }


@job("evaluate_tasks", folder="lm_eval")
def describe_evaluate_tasks(name):
    stage, _, recipe_name = name.partition("/")
    settings = recipe(stage, recipe_name)
    tasks = [task for task in config["lm_eval"]["tasks"] if task.endswith(".yaml")]
    for task in tasks:
        if not (ROOT / task).is_file():
            fail(f"config: lm_eval.tasks names {task}: there is no {ROOT / task}")
    return {
        "settings": {**{key: settings[key] for key in ("seed", "dtype")}, **config["lm_eval"]},
        "inputs": {"model": trained(name)},
        "files": {task: digest_cache()[ROOT / task] for task in tasks},
    }


# Of each stage: jobs called STAGE/NAME.


@job("write_record", folder="record")
def describe_write_record(name):
    stage, _, recipe_name = name.partition("/")
    return {
        "settings": {"language": config["language"]},
        "inputs": {
            "tokens": (f"tokenize_{stage}", recipe_name),
            "training": (f"train_{stage}", recipe_name),
            "evaluation": (f"evaluate_{stage}", recipe_name),
        },
    }


@job("compare_zero", folder="zero_runs")
def describe_compare_zero(name):
    stage, _, recipe_name = name.partition("/")
    training, _ = spec_of(f"train_{stage}", recipe_name)
    return {
        # The whole spec of the training that is tried, its code too.
        "settings": {"steps": config["zero"]["steps"], "training": training},
        "inputs": {key: (made["rule"], made["name"]) for key, made in training["inputs"].items()},
    }


@job("compare_runs", folder="compare")
def describe_compare_runs(name):
    stage, _, names = name.partition("/")
    recipes = compared(stage, names)
    return {
        "settings": {"language": config["language"], "recipes": recipes},
        "inputs": {
            **{f"training.{each}": (f"train_{stage}", each) for each in recipes},
            **{f"evaluation.{each}": (f"evaluate_{stage}", each) for each in recipes},
        },
    }


@job("draw_zero", folder="zero")
def describe_draw_zero(name):
    return {
        "settings": {"language": config["language"]},
        "inputs": {"runs": ("compare_zero", name)},
    }
