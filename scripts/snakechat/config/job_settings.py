"""Settings, inputs and files that the descriptions of several jobs share (rules/*.smk)."""

from pathlib import Path
from typing import Any

from snakechat.config.recipes import Config, Job
from snakechat.data.dataset_files import local_paths, split_files
from snakechat.data.model_files import model_files
from snakechat.workflow.errors import InputError

Jobs = dict[str, Job]


def tokenization(config: Config, stage: str, name: str, *keys: str) -> tuple[dict[str, Any], Jobs]:
    """Return settings and inputs of the job that tokenizes a recipe's phase.

    keys: the settings of the recipe that the job needs in addition to the common ones.
    """
    recipe = config.recipe(stage, name)
    settings = {
        "seed": recipe["seed"],
        "datasets": config.blend(stage, name),
        "template": config.template(stage, name),
        **{key: recipe[key] for key in keys},
    }
    inputs = {"tokenizer": config.tokenizer_model(stage, name)}
    for dataset, _ in config.blend(stage, name):
        inputs[f"records.{dataset}"] = ("import_dataset", dataset)
        inputs[f"rows.{dataset}"] = ("split_dataset", dataset)
    return settings, inputs


def training_job(model: str) -> Job:
    """Return the job that trains STAGE/RECIPE."""
    stage, _, name = model.partition("/")
    return f"train_{stage}", name


def models_of(config: Config, stage: str, name: str) -> Jobs:
    """Return the jobs of a recipe's model and of the models it is compared with, by label."""
    if stage == "rlhf":
        recipe = config.recipe("rlhf", name)
        jobs = models_of(config, "sft", recipe["actor"])
        jobs |= {f"compare_with.{model}": training_job(model) for model in recipe["compare_with"]}
    else:
        rule, origin = config.base_model(stage, name)
        jobs = (
            models_of(config, "sft", origin) if rule == "train_sft" else {"base": (rule, origin)}
        )
    return {**jobs, stage: (f"train_{stage}", name)}


def dataset_files(config: Config, name: str, source: Path) -> list[str]:
    """Return the files of a local dataset as SPLIT/PATH, relative to its source.

    Raises:
        InputError: The source does not exist, or its files cannot be assigned to splits.
    """
    if source.is_file():
        return [f"train/{source.name}"]
    place = f"config: datasets.{name}"
    if not source.is_dir():
        raise InputError(f"{place}.path: {source} does not exist")
    dataset = config.values["datasets"][name]
    globs = {split: dataset[split] for split in ("train", "eval") if split in dataset}
    try:
        splits = split_files(local_paths(source), globs)
    except InputError as error:
        raise InputError(f"{place}: {source}: {error}") from None
    for path in (path for paths in splits.values() for path in paths):
        if not (source / path).exists():
            raise InputError(f"{place}: {source / path} is a broken link")
    return [f"{split}/{path}" for split, paths in splits.items() for path in paths]


def base_model_files(name: str, source: Path) -> list[str]:
    """Return the names of the files that a base model is read from.

    Raises:
        InputError: The folder does not exist or has no weights.
    """
    place = f"config: models.{name}.path"
    if not source.is_dir():
        raise InputError(f"{place}: there is no folder {source}")
    files = model_files(sorted(path.name for path in source.iterdir() if path.is_file()))
    if not any(file.endswith((".safetensors", ".bin")) for file in files):
        raise InputError(f"{place}: {source} has no *.safetensors and no pytorch_model*.bin")
    return files


def tokenizer_files(name: str, source: Path) -> list[str]:
    """Return the names of the files of a tokenizer in a folder.

    Raises:
        InputError: The folder has none.
    """
    files = sorted(
        path.name for kind in ("json", "txt", "jinja") for path in source.glob(f"*.{kind}")
    )
    if not files:
        raise InputError(f"config: models.{name}.tokenizer.path: {source} has no tokenizer files")
    return files


def prompt_set_files(root: Path, folder: str, names: list[str]) -> list[str]:
    """Return the paths of prompt sets in a folder of the workflow.

    Raises:
        InputError: A set does not exist.
    """
    existing = sorted(path.stem for path in (root / folder).glob("*.yaml"))
    for name in names:
        if name not in existing:
            raise InputError(
                f"config: prompt_sets names {name!r}, and {folder} has no {name}.yaml"
                f" (it has: {', '.join(existing) or 'none'})"
            )
    return [f"{folder}/{name}.yaml" for name in names]
