"""Describes the jobs that make datasets, splits and base models, and their external files.

A function with the name of a rule describes the jobs of this rule. Paths of files below the working
directory are relative to it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.config.recipes import Config, ConfigError, JobId
from snakechat.config.sections import judge_settings
from snakechat.data.dataset_files import (
    check_sources,
    checked_kind,
    local_paths,
    saved_splits,
    split_files,
    train_and_eval,
)
from snakechat.data.formats import columns_of, named_columns
from snakechat.data.hub import card_facts, card_metadata
from snakechat.data.model_files import model_files
from snakechat.workflow.errors import InputError

Inputs = dict[str, JobId]


class Description(NamedTuple):
    """What a job is made from, apart from its code and the pinned libraries, and where that is.

    Attributes:
        settings: JSON values that the program reads.
        inputs: Upstream jobs by the keys that the program uses for them.
        files: External files by the names that the spec has for them.
        options: RunOptions that this job has, such as the folder of the files. No result is made
            from them.
    """

    settings: dict[str, Any]
    inputs: Mapping[str, JobId] = {}
    files: Mapping[str, Path] = {}
    options: Mapping[str, Any] = {}


# --- jobs ---------------------------------------------------------------------------------------


def import_dataset(config: Config, name: str) -> Description:
    dataset = config.entry("datasets", name, "the target")
    if "generate" in dataset:
        generated = present(dataset, "seed", "generate", "rows", "eval_rows")
        return Description({"seed": config.values["seed"], **generated})
    folder, files = dataset_files(config, name)
    settings = {
        "on_bad_row": config.values["on_bad_row"],
        **_origin(dataset, folder),
        **present(dataset, "format", "remove", "prompt_template", "system", "on_bad_row"),
        **({} if folder else config.selection(name)),
        "columns": columns_of(dataset["format"], dataset.get("columns")),
        "keep": named_columns(dataset.get("keep", {})),
    }
    return Description(settings, {}, files, {"source": str(folder or "")})


def select_responses(config: Config, name: str) -> Description:
    dataset = config.values["datasets"][name]
    return Description(
        settings={
            "select": dataset["select"],
            "min_score": dataset.get("min_score"),
            "min_margin": dataset.get("min_margin", 0.0),
        },
        inputs={"scores": ("score_responses", dataset["generations"])},
    )


def label_pairs(config: Config, name: str) -> Description:
    dataset = config.values["datasets"][name]
    return Description(
        settings={
            "seed": config.values["seed"],
            "max_rows": dataset.get("max_rows"),
            "llm_judge": dataset["llm_judge"],
            "llm_judges": judge_settings(config.values["llm_judges"], [dataset["llm_judge"]]),
            **present(config.values["datasets"][dataset["label"]], "exclude"),
        },
        inputs={"records": config.records_job(dataset["label"])},
    )


def split_dataset(config: Config, name: str) -> Description:
    dataset = config.entry("datasets", name, "the target")
    return Description(
        settings={
            "seed": config.values["seed"],
            "weights": config.split_weights(name),
            "by": config.values["split"]["by"],
            # A dataset with labels has no more rows than that: each label costs two requests.
            "max_rows": None if "label" in dataset else dataset.get("max_rows"),
            **present(dataset, "exclude"),
        },
        inputs={"records": config.records_job(name)},
    )


def fetch_model(config: Config, name: str) -> Description:
    model = config.values["models"][name]
    folder, files = base_model_files(config, name)
    settings = _origin(model, folder) | present(model, "template_arguments")
    return Description(settings, {}, files, {"source": str(folder or "")})


def init_model(config: Config, name: str) -> Description:
    model = config.values["models"][name]
    tokenizer = dict(model["tokenizer"])
    dataset = tokenizer.pop("train_on")
    return Description(
        settings={
            "seed": config.values["seed"],
            "init": model["init"],
            "tokenizer": tokenizer | present(config.values["datasets"][dataset], "exclude"),
            **present(model, "template_arguments"),
        },
        inputs={"records": config.records_job(dataset)},
    )


def _origin(entry: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return the repository and the revision of a dataset or model, or what its card declares.

    Without a revision, it is the main branch, whose commit the job records. Of the card of a local
    folder, the text for people changes no result.
    """
    if folder is not None:
        return {"card": card_facts(folder)}
    return {"hub": entry["hub"], "revision": entry.get("revision", "main")}


def present(entry: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return the values of some keys, where an entry has them."""
    return {key: entry[key] for key in keys if key in entry}


# --- external files -----------------------------------------------------------------------------
# Each function returns a folder and the files in it by their names in specs: None and {} where the
# config has no path. An error of the files names the key.


def dataset_files(config: Config, name: str) -> tuple[Path | None, dict[str, Path]]:
    """Return the files of a dataset by SPLIT/PATH, relative to its folder."""
    source, selection = config.source_of("datasets", name), config.selection(name)
    if source is None:
        return None, {}
    folder = source.parent if source.is_file() else source
    unread = set[str]()
    with errors_at(f"datasets.{name}.path: {source}"):
        if not source.exists():
            raise InputError("it does not exist")
        if source.is_file():
            checked_kind(source.name)
            splits, unread = {"train": [source.name]}, set(selection)
        elif "train" not in selection and (saved := saved_splits(source)):
            splits = train_and_eval(saved, selection.get("split", {}), local_paths(source))
            unread = {"name"} & selection.keys()
        else:
            place = f"datasets.{name}: {folder}"
            splits = split_files(
                local_paths(source), selection, card_metadata(source).get("configs"), place
            )
        # With `hub`, the path stands for a repository, whose files these keys select.
        if unread and "hub" not in config.values["datasets"][name]:
            raise InputError(f"{min(unread)} has no effect on a single file or a saved dataset")
        if folder == source:
            check_sources(folder, [path for paths in splits.values() for path in paths])
    return folder, {f"{each}/{path}": folder / path for each in splits for path in splits[each]}


def base_model_files(config: Config, name: str) -> tuple[Path | None, dict[str, Path]]:
    """Return the files that a base model is read from."""
    folder = config.source_of("models", name)
    if folder is None:
        return None, {}
    with errors_at(f"models.{name}.path: {folder}"):
        if not folder.is_dir():
            raise InputError("the folder does not exist")
        found = sorted(path.name for path in folder.iterdir() if path.is_file())
        names = model_files(found, all_formats=True)
        if not any(file.endswith((".safetensors", ".bin")) for file in names):
            raise InputError("it has no *.safetensors and no pytorch_model*.bin")
        check_sources(folder, names)
    return folder, {name: folder / name for name in names}


@contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Have errors of files name the place in the config."""
    try:
        yield
    except InputError as error:
        raise ConfigError(f"config: {place}: {error}") from None
