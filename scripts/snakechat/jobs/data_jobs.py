"""Describes the jobs that make datasets, splits and base models, and their external files.

A function with the name of a rule describes the jobs of this rule. Paths of files are relative to
the working directory, in the form in which specs record them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.config.recipes import Config, JobId
from snakechat.config.sections import judge_settings
from snakechat.data.dataset_files import (
    Splits,
    check_kinds,
    check_link,
    local_paths,
    saved_splits,
    split_files,
    splits_in_child,
    train_and_eval,
)
from snakechat.data.formats import columns_of, named_columns
from snakechat.data.hub import card_configs, card_facts
from snakechat.data.model_files import CARD, TEXTS, model_files
from snakechat.workflow.errors import InputError, warn

# The default of huggingface_hub.
MAIN_BRANCH = "main"

Jobs = dict[str, JobId]


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
        seed = dataset.get("seed", config.values["seed"])
        return Description({"seed": seed, **_present(dataset, "generate", "rows", "eval_rows")})
    folder = dataset_folder(config, name)
    settings = {
        "on_bad_row": config.values["on_bad_row"],
        **_hub_source(dataset),
        **_card_settings(folder),
        **_present(dataset, "format", "remove", "prompt_template", "system", "on_bad_row"),
        **({} if folder else config.selection(name)),
        "columns": columns_of(dataset["format"], dataset.get("columns")),
        "keep": named_columns(dataset.get("keep", {})),
    }
    return Description(settings, files=dataset_files(config, name), options=_source(folder))


def select_responses(config: Config, name: str) -> Description:
    dataset, recipe = config.values["datasets"][name], config.generated_by(name)
    assert recipe is not None
    defaults = {"min_score": None, "min_margin": 0.0}
    return Description(
        settings={key: dataset.get(key, defaults.get(key)) for key in ("select", *defaults)},
        inputs={"scores": ("score_responses", recipe)},
    )


def label_pairs(config: Config, name: str) -> Description:
    dataset = config.values["datasets"][name]
    return Description(
        settings={
            "seed": config.values["seed"],
            "max_rows": dataset.get("max_rows"),
            "llm_judge": dataset["llm_judge"],
            "llm_judges": judge_settings(config.values["llm_judges"], [dataset["llm_judge"]]),
            **_present(config.values["datasets"][dataset["label"]], "exclude"),
        },
        inputs={"records": config.records_job(dataset["label"])},
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
            **_present(dataset, "exclude"),
        },
        inputs={"records": config.records_job(name)},
    )


def fetch_model(config: Config, name: str) -> Description:
    model, folder = config.values["models"][name], config.source_of("models", name)
    settings = {**_hub_source(model), **_card_settings(folder)}
    return Description(
        settings=settings | _present(model, "template_arguments"),
        files=base_model_files(config, name),
        options=_source(folder),
    )


def init_model(config: Config, name: str) -> Description:
    model = config.values["models"][name]
    tokenizer = {key: value for key, value in model["tokenizer"].items() if key != "path"}
    inputs: Jobs = {}
    if "train_on" in tokenizer:
        dataset = tokenizer.pop("train_on")
        tokenizer |= _present(config.values["datasets"][dataset], "exclude")
        inputs = {"records": config.records_job(dataset)}
    settings = {"seed": config.values["seed"], "init": model["init"], "tokenizer": tokenizer}
    return Description(
        settings=settings | _present(model, "template_arguments"),
        inputs=inputs,
        files=tokenizer_files(config, name),
        options=_source(_tokenizer_folder(config, name)),
    )


def _source(folder: Path | None) -> dict[str, str]:
    """Return the option that has the folder of a job's external files; {} without one."""
    return {} if folder is None else {"source": str(folder)}


def _hub_source(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the repository and the revision of a dataset or model; nothing if it has a path.

    Without a revision, it is the main branch, whose commit the job records.
    """
    if "path" in entry:
        return {}
    return {"hub": entry["hub"], "revision": entry.get("revision", MAIN_BRANCH)}


def _card_settings(folder: Path | None) -> dict[str, Any]:
    """Return what counts of the card of a dataset or a model with a path, given its folder.

    It is what the card of a local folder declares. Its text for people changes no result.
    """
    return {} if folder is None else {"card": card_facts(folder)}


def _present(entry: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return the values of some keys, where an entry has them."""
    return {key: entry[key] for key in keys if key in entry}


# --- external files -----------------------------------------------------------------------------


def dataset_folder(config: Config, name: str) -> Path | None:
    """Return the folder of a dataset, or None if it has no path."""
    source = config.source_of("datasets", name)
    return source.parent if source and source.is_file() else source


def dataset_files(config: Config, name: str) -> dict[str, Path]:
    """Return the files of a dataset with a path by SPLIT/PATH, which is relative to its folder.

    Files that may have rows and belong to no split are a warning.

    Raises:
        InputError: The source does not exist, or its files cannot be assigned to splits.
    """
    source, folder = config.source_of("datasets", name), dataset_folder(config, name)
    if source is None or folder is None:
        return {}
    place = f"config: datasets.{name}"
    if not source.exists():
        raise InputError(f"{place}.path: {source} does not exist")
    # A path in place of a repository leaves what selects the repository's files.
    is_copy = "hub" in config.values["datasets"][name]
    with _errors_at(f"{place}: {source}"):
        splits, remark = _splits_of(source, config.selection(name), is_copy)
        if source == folder:
            _check_files(folder, [path for paths in splits.values() for path in paths])
    if remark:
        warn(f"datasets.{name}: {folder}: {remark}")
    return {f"{split}/{path}": folder / path for split, paths in splits.items() for path in paths}


def _splits_of(source: Path, selection: Mapping[str, Any], is_copy: bool) -> Splits:
    """Return the files of each split of a local dataset, and a remark on files without a split.

    is_copy: Whether the source is a copy of a repository, whose selection is already made.
    """
    chosen = () if is_copy else selection.keys()
    if source.is_file():
        check_kinds([source.name])
        _check_unread(chosen, "a single file")
        return {"train": [source.name]}, None
    paths = local_paths(source)
    saved = {} if "train" in selection else saved_splits(source)
    if saved:
        _check_unread({"name"}.intersection(chosen), "what save_to_disk wrote")
        return train_and_eval(saved, selection.get("split", {}), paths), None
    return split_files(paths, selection, card_configs(source), splits_in_child)


def _check_unread(keys: Collection[str], source: str) -> None:
    """Raise InputError for keys that select files of a source which has none to select."""
    if keys:
        raise InputError(
            f"{min(keys)} has no effect on {source}: remove it, or name another folder as path"
        )


@contextmanager
def _errors_at(place: str) -> Iterator[None]:
    """Have errors of files name the place in the config, and the folder."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def _check_files(folder: Path, paths: Iterable[str]) -> None:
    """Raise InputError if a file in a folder cannot be read, or is a link that leads out of it.

    Reading a named pipe or a device would not end.
    """
    for path in paths:
        if not (folder / path).exists():
            raise InputError(f"{path} is a broken link")
        if not (folder / path).is_file():
            raise InputError(f"{path} is not a regular file: remove it")
        check_link(folder, path)


def base_model_files(config: Config, name: str) -> dict[str, Path]:
    """Return the files that a base model with a path is read from, by name, without its card.

    Raises:
        InputError: The folder does not exist or has no weights, or a file is not in it.
    """
    folder = config.source_of("models", name)
    if folder is None:
        return {}
    with _errors_at(f"config: models.{name}.path"):
        if not folder.is_dir():
            raise InputError(f"there is no folder {folder}")
        found = sorted(path.name for path in folder.iterdir() if path.is_file())
        files = [file for file in model_files(found, all_formats=True) if file != CARD]
        if not any(file.endswith((".safetensors", ".bin")) for file in files):
            raise InputError(f"{folder} has no *.safetensors and no pytorch_model*.bin")
        return _files_in(folder, files)


def _tokenizer_folder(config: Config, name: str) -> Path | None:
    """Return the folder that the tokenizer of an initialized model is copied from, or None."""
    path = config.values["models"][name]["tokenizer"].get("path")
    return None if path is None else config.local_path(path)


def tokenizer_files(config: Config, name: str) -> dict[str, Path]:
    """Return the files of the tokenizer that an initialized model copies, by name; {} without one.

    Raises:
        InputError: The folder has none, or one of them is not in it.
    """
    folder = _tokenizer_folder(config, name)
    if folder is None:
        return {}
    paths = {path.name for each in ("*.json", "*.jinja", *TEXTS) for path in folder.glob(each)}
    with _errors_at(f"config: models.{name}.tokenizer.path"):
        if not paths:
            raise InputError(f"{folder} has no tokenizer files")
        return _files_in(folder, sorted(paths))


def _files_in(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """Return files of a folder by name, once they are checked."""
    with _errors_at(str(folder)):
        _check_files(folder, names)
    return {name: folder / name for name in names}
