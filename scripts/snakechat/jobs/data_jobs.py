"""Describes the jobs that make datasets, splits and base models.

A function has the name of the rule whose jobs it describes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snakechat.config.recipes import Config
from snakechat.data.formats import columns_of, named_columns
from snakechat.jobs.descriptions import Description, Jobs
from snakechat.jobs.files import (
    base_model_files,
    card_settings,
    dataset_files,
    dataset_folder,
    tokenizer_files,
    tokenizer_folder,
)

# The default of huggingface_hub.
MAIN_BRANCH = "main"


def import_dataset(config: Config, name: str) -> Description:
    dataset = config.entry("datasets", name, "the target")
    if "generate" in dataset:
        seed = dataset.get("seed", config.values["seed"])
        keys = ["generate", "rows", "eval_rows"]
        settings = {"seed": seed, **_present(dataset, keys)}
    else:
        keys = ["format", "remove", "prompt_template", "system", "on_bad_row"]
        selection = {} if "path" in dataset else config.selection(name)
        settings = {
            "on_bad_row": config.values["on_bad_row"],
            **_hub_source(dataset),
            **card_settings(dataset_folder(config, name)),
            **_present(dataset, keys),
            **selection,
            "columns": columns_of(dataset["format"], dataset.get("columns")),
            "keep": named_columns(dataset.get("keep", {})),
        }
    return Description(
        settings, files=dataset_files(config, name), options=_source(dataset_folder(config, name))
    )


def select_responses(config: Config, name: str) -> Description:
    dataset, recipe = config.values["datasets"][name], config.generated_by(name)
    assert recipe is not None
    defaults = {"min_score": None, "min_margin": 0.0}
    return Description(
        settings={key: dataset.get(key, defaults.get(key)) for key in ("select", *defaults)},
        inputs={"scores": ("score_responses", recipe)},
    )


def label_pairs(config: Config, name: str) -> Description:
    dataset, labelled = config.values["datasets"][name], config.labelled_dataset(name)
    return Description(
        settings={
            "seed": config.values["seed"],
            "max_rows": dataset.get("max_rows"),
            "llm_judge": dataset["llm_judge"],
            "llm_judges": config.judge_settings([dataset["llm_judge"]]),
            **_exclude_settings(config, labelled),
        },
        inputs={"records": config.records_job(labelled)},
    )


def split_dataset(config: Config, name: str) -> Description:
    dataset = config.values["datasets"][name]
    return Description(
        settings={
            "seed": config.values["seed"],
            "weights": config.split_weights(name),
            "by": config.values["split"]["by"],
            # A dataset with labels has no more rows than that: each label costs two requests.
            "max_rows": None if "label" in dataset else dataset.get("max_rows"),
            **_exclude_settings(config, name),
        },
        inputs={"records": config.records_job(name)},
    )


def fetch_model(config: Config, name: str) -> Description:
    model = config.values["models"][name]
    folder = config.source_of("models", name)
    source = _hub_source(model) | card_settings(folder)
    return Description(
        settings=source | _present(model, ["template_arguments"]),
        files=base_model_files(config, name),
        options=_source(folder),
    )


def init_model(config: Config, name: str) -> Description:
    model = config.values["models"][name]
    tokenizer = {key: value for key, value in model["tokenizer"].items() if key != "path"}
    inputs: Jobs = {}
    if "train_on" in tokenizer:
        dataset = tokenizer.pop("train_on")
        tokenizer |= _exclude_settings(config, dataset)
        inputs = {"records": config.records_job(dataset)}
    settings = {"seed": config.values["seed"], "init": model["init"], "tokenizer": tokenizer}
    return Description(
        settings=settings | _present(model, ["template_arguments"]),
        inputs=inputs,
        files=tokenizer_files(config, name),
        options=_source(tokenizer_folder(config, name)),
    )


def _source(folder: Path | None) -> dict[str, str]:
    """Return the option that has the folder of a job's external files; {} without one."""
    return {} if folder is None else {"source": str(folder)}


def _hub_source(entry: dict[str, Any]) -> dict[str, str]:
    """Return the repository and the revision of a dataset or model; nothing if it has a path.

    Without a revision, it is the main branch, whose commit the job records.
    """
    if "path" in entry:
        return {}
    return {"hub": entry["hub"], "revision": entry.get("revision", MAIN_BRANCH)}


def _exclude_settings(config: Config, dataset: str) -> dict[str, Any]:
    """Return the part of a job's settings that names the excluded rows of a dataset; {} if none."""
    excluded = _present(config.values["datasets"][dataset], ["exclude"])
    return {key: sorted(set(digests)) for key, digests in excluded.items()}


def _present(entry: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return the values of some keys, where an entry has them."""
    return {key: entry[key] for key in keys if key in entry}
