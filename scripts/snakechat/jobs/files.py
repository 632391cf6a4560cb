"""External files of jobs: datasets, models, tokenizers, prompt sets.

Paths are relative to the working directory, in the form in which specs record them.
"""

from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from snakechat.config.recipes import Config
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
from snakechat.data.hub import card_configs, card_facts, normalized_license
from snakechat.data.model_files import CARD, TEXTS, model_files
from snakechat.workflow.errors import InputError, warn


def dataset_folder(config: Config, name: str) -> Path | None:
    """Return the folder of a dataset, or None if it has no path."""
    source = config.source_of("datasets", name)
    return source.parent if source and source.is_file() else source


def card_settings(folder: Path | None) -> dict[str, Any]:
    """Return what counts of the card of a dataset or a model with a path, given its folder.

    It is what the card of a local folder declares. Its text for people changes no result.
    """
    return {} if folder is None else {"card": card_facts(folder)}


def dataset_files(config: Config, name: str) -> dict[str, Path]:
    """Return the files of a dataset with a path by SPLIT/PATH, which is relative to its folder.

    Files that may have rows and belong to no split are a warning.

    Raises:
        InputError: The source does not exist, or its files cannot be assigned to splits.
    """
    folder = dataset_folder(config, name)
    if folder is None:
        return {}
    splits, remark = _local_splits(config, name)
    if remark:
        warn(f"datasets.{name}: {folder}: {remark}")
    return {f"{split}/{path}": folder / path for split, paths in splits.items() for path in paths}


def _local_splits(config: Config, name: str) -> Splits:
    source, place = config.source_of("datasets", name), f"config: datasets.{name}"
    assert source is not None
    if not source.exists():
        raise InputError(f"{place}.path: {source} does not exist")
    selection = config.selection(name)
    # A path in place of a repository leaves what selects the repository's files.
    chosen = {} if "hub" in config.values["datasets"][name] else selection
    try:
        if source.is_file():
            check_kinds([source.name])
            _check_unread(chosen, "a single file")
            return {"train": [source.name]}, None
        paths = local_paths(source)
        saved = {} if "train" in selection else saved_splits(source)
        if saved:
            _check_unread(chosen.keys() & {"name"}, "what save_to_disk wrote")
            splits, remark = train_and_eval(saved, selection.get("split", {}), paths), None
        else:
            splits, remark = split_files(paths, selection, card_configs(source), splits_in_child)
    except InputError as error:
        raise InputError(f"{place}: {source}: {error}") from None
    _check_files(place, source, [path for files in splits.values() for path in files])
    return splits, remark


def _check_unread(keys: Collection[str], source: str) -> None:
    """Raise InputError for keys that select files of a source which has none to select."""
    if keys:
        raise InputError(
            f"{min(keys)} has no effect on {source}: remove it, or name another folder as path"
        )


def _check_files(place: str, folder: Path, paths: Iterable[str]) -> None:
    """Raise InputError if a file in a folder cannot be read, or is a link that leads out of it.

    Reading a named pipe or a device would not end.

    place: What the folder is in the config.
    """
    try:
        for path in paths:
            if not (folder / path).exists():
                raise InputError(f"{path} is a broken link")
            if not (folder / path).is_file():
                raise InputError(f"{path} is not a regular file: remove it")
            check_link(folder, path)
    except InputError as error:
        raise InputError(f"{place}: {folder}: {error}") from None


def base_model_files(config: Config, name: str) -> dict[str, Path]:
    """Return the files that a base model with a path is read from, by name, without its card.

    Raises:
        InputError: The folder does not exist or has no weights, or a file is not in it.
    """
    folder = config.source_of("models", name)
    if folder is None:
        return {}
    place = f"config: models.{name}.path"
    if not folder.is_dir():
        raise InputError(f"{place}: there is no folder {folder}")
    found = {path.name: path for path in folder.iterdir() if path.is_file()}
    files = [file for file in model_files(sorted(found), all_formats=True) if file != CARD]
    if not any(file.endswith((".safetensors", ".bin")) for file in files):
        raise InputError(f"{place}: {folder} has no *.safetensors and no pytorch_model*.bin")
    _check_files(place, folder, files)
    return {file: found[file] for file in files}


def tokenizer_folder(config: Config, name: str) -> Path | None:
    """Return the folder that the tokenizer of an initialized model is copied from, or None."""
    path = config.values["models"][name]["tokenizer"].get("path")
    return None if path is None else config.local_path(path)


def tokenizer_files(config: Config, name: str) -> dict[str, Path]:
    """Return the files of the tokenizer that an initialized model copies, by name; {} without one.

    Raises:
        InputError: The folder has none, or one of them is not in it.
    """
    folder = tokenizer_folder(config, name)
    if folder is None:
        return {}
    patterns = ("*.json", "*.jinja", *TEXTS)
    paths = sorted(path for pattern in patterns for path in folder.glob(pattern))
    place = f"config: models.{name}.tokenizer.path"
    if not paths:
        raise InputError(f"{place}: {folder} has no tokenizer files")
    _check_files(place, folder, [path.name for path in paths])
    return {path.name: path for path in paths}


def prompt_source(config: Config) -> Path:
    """Return the folder that has prompts/: of the user, or else of the workflow."""
    return config.root if (config.root / "prompts").is_dir() else config.sources


def prompt_set_files(config: Config, folder: str, stage: str, name: str) -> dict[str, Path]:
    """Return the files of a recipe's prompt sets in a folder of prompt_source.

    Raises:
        InputError: A set does not exist.
    """
    source = prompt_source(config)
    existing = sorted(path.stem for path in (source / folder).glob("*.yaml"))
    names = config.prompt_sets(stage, name)
    for prompt_set in names:
        if prompt_set not in existing:
            raise InputError(
                f"config: prompt_sets names {prompt_set!r}, and {folder} has no {prompt_set}.yaml"
                f" (it has: {', '.join(existing) or 'none'})"
            )
    paths = [f"{folder}/{prompt_set}.yaml" for prompt_set in names]
    return {path: source / path for path in paths}


@cache
def declared_licenses(config: Config) -> dict[str, str]:
    """Return the licences that the config declares, by the path of the import or the fetch.

    They are no settings of these jobs: a licence changes no bytes of data.
    """
    declared = {
        f"output/{folder}/{name}": normalized_license(entry.get("license"))
        for section, folder in (("datasets", "data"), ("models", "models"))
        for name, entry in config.values[section].items()
    }
    return {path: license for path, license in declared.items() if license}
