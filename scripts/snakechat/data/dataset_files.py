"""Which files of a dataset belong to its splits, train and eval.

Standard library only: the workflow imports this module while it plans.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import MANIFEST

# wget keeps the query of the hub's download links in file names.
KINDS = re.compile(
    r"\.(?:(parquet|arrow)|(jsonl|ndjson|jsonlines|json|csv|tsv)"
    r"(\.(gz|gzip|bz2|xz|zst|zstd|lz4))?)(\?download=true)?$"
)
EXPECTED_KINDS = "parquet, arrow, jsonl, json, csv or tsv"
# What `datasets.save_to_disk` writes for a split, and for several splits.
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
# Hidden files and folders, the caches of datasets' map(), and what the library writes next to rows.
HIDDEN = re.compile(
    r"(^|/)(\.|cache-[0-9a-f]{16}|"
    rf"(dataset_infos?\.json|{re.escape(SAVED)}|{re.escape(SAVED_SPLITS)})$)"
)
# What is not data beside files with rows: documents, code, pictures, names such as LICENSE.
DOCUMENTS = re.compile(
    r"\.(md|rst|pdf|html?|ya?ml|toml|cff|bib|py|ipynb|sh|lock|png|jpe?g|gif|svg|webp)$"
    r"|(^|/)(_[^/]*|[A-Z][A-Z_-]*(\.txt)?|Makefile|Dockerfile)$"
)
# Splits of the datasets library that are held out, the first one that a dataset has.
HELD_OUT = ("validation", "test")

# Returns the files of each split of the datasets library: see resolution.py.
Resolve = Callable[[Sequence[str], Any, str | None], dict[str, list[str]]]
# The files of train, and of eval if there is one, and a remark on files of neither.
Splits = tuple[dict[str, list[str]], str | None]


def kind_of(path: str | Path) -> str | None:
    """Return parquet, arrow, jsonl, json, csv or tsv, or None for a file of another kind.

    json, csv and the like may be compressed.
    """
    match = KINDS.search(os.path.basename(path).lower())
    if match is None:
        return None
    kind = match[1] or match[2]
    return "jsonl" if kind in ("ndjson", "jsonlines") else kind


def local_paths(folder: str | Path) -> list[str]:
    """Return the sorted paths of all files in a folder, relative to it.

    The folder may be a link itself. Links to folders are followed, each folder once, and not to a
    folder that contains the link: folders that link to one another have endless paths.

    Raises:
        InputError: A link to a folder leads out of it.
    """
    paths = []
    followed = {os.path.realpath(folder)}
    for parent, folders, names in os.walk(folder, followlinks=True):
        paths += [os.path.relpath(os.path.join(parent, name), folder) for name in names]
        for name in sorted(folders):
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                continue
            if not name.startswith("."):
                check_link(folder, os.path.relpath(path, folder))
            real = os.path.realpath(path)
            if real in followed or Path(os.path.realpath(parent)).is_relative_to(real):
                folders.remove(name)
            else:
                followed.add(real)
        folders.sort()
    return sorted(paths)


def check_link(folder: str | Path, path: str) -> None:
    """Raise InputError if a path in a folder is a link that leads out of the folder.

    In the cache of huggingface_hub, links may lead from snapshots/COMMIT to blobs; in output/, to
    results.
    """
    link = Path(folder, path)
    if not link.is_symlink():
        return
    root, target = Path(folder).resolve(), Path(os.path.realpath(link))
    blobs = [parent.with_name("blobs") for parent in root.parents if parent.name == "snapshots"]
    is_of_result = any((parent / MANIFEST).is_file() for parent in target.parents)
    if not is_of_result and not any(map(target.is_relative_to, [root, *blobs])):
        raise InputError(
            f"{path} is a link to {target}, outside of the folder: name what it leads to as `path`,"
            " or copy it there"
        )


def split_files(
    paths: Sequence[str], source: Mapping[str, Any], configs: Any, resolve: Resolve
) -> Splits:
    """Assign files to the splits of a dataset.

    With the glob `train`, and maybe `eval`, the globs select them. Otherwise, the datasets library
    does, by the card or the names of the files: its split train, and validation or else test,
    unless `split` names others.

    Args:
        paths: All files of a folder or repository, relative to it.
        source: train, eval, name and split of a dataset in the config, as far as they are set.
        configs: What the card says of configs, or None.
        resolve: resolve_splits or splits_in_child.

    Raises:
        InputError: A split has no files, a file belongs to both splits, or files cannot be read
            together.
    """
    remark = None
    if "train" in source:
        globs = {split: source[split] for split in ("train", "eval") if split in source}
        splits = {split: [p for p in paths if matches(p, glob)] for split, glob in globs.items()}
        for split, matched in splits.items():
            if not matched:
                raise InputError(f"{split}: no file matches {globs[split]!r}")
    else:
        visible = [path for path in paths if not HIDDEN.search(path)]
        found = resolve([path for path in visible if kind_of(path)], configs, source.get("name"))
        splits = train_and_eval(found, source.get("split", {}), visible)
        assigned = {path for files in found.values() for path in files}
        unread = [p for p in visible if p not in assigned and not DOCUMENTS.search(p)]
        # A card, or the name of a folder, selects files on purpose.
        if unread and not configs and "name" not in source:
            remark = (
                f"not read: {_listed(unread)}, of another kind or without a split in the name:"
                " rename them, or select the files by train:"
            )
    check_kinds(path for files in splits.values() for path in files)
    for files in splits.values():
        _check_together(files)
    if overlap := set(splits["train"]) & set(splits.get("eval", [])):
        raise InputError(
            f"{min(overlap)} is both in the train and in the eval split: rename it, or set train:"
            " and eval:"
        )
    return splits, remark


def train_and_eval(
    found: Mapping[str, list[str]], wanted: Mapping[str, str], visible: Sequence[str]
) -> dict[str, list[str]]:
    """Return the files of train and eval, given the files of each split of the datasets library.

    Args:
        found: The files of each split.
        wanted: Names of these splits by train and eval.
        visible: All files, for errors.

    Raises:
        InputError: There is no such split.
    """
    if not found:
        others = f", found {_listed(visible)}" if visible else ""
        raise InputError(f"no training files: expected {EXPECTED_KINDS}{others}")
    train = wanted.get("train", "train")
    held_out = [split for split in HELD_OUT if split in found and split != train]
    names = {"train": train} | ({"eval": held_out[0]} if held_out else {}) | dict(wanted)
    for split, name in names.items():
        if name not in found:
            shown = [f"{known} ({_listed(files)})" for known, files in found.items()]
            assigned = {path for files in found.values() for path in files}
            if left := [path for path in visible if kind_of(path) and path not in assigned]:
                shown.append(f"without a split {_listed(left)}")
            hint = f"set split: {{{split}: NAME}}, or select the files by train:"
            raise InputError(f"no files of the split {name}, found {', '.join(shown)}: {hint}")
    return {split: found[name] for split, name in names.items()}


def _check_together(paths: Sequence[str]) -> None:
    """Raise InputError if files of a split are of several kinds, or seem to be copies."""
    kinds = sorted({kind_of(path) or "" for path in paths})
    if len(kinds) > 1:
        raise InputError(
            f"files of several kinds ({', '.join(kinds)}): select the files to import by train:"
        )
    known: dict[str, str] = {}
    for path in paths:
        first = known.setdefault(KINDS.sub("", path), path)
        if first != path:
            raise InputError(f"{first} and {path} have the same name: remove one of them")


def saved_splits(folder: Path) -> dict[str, list[str]]:
    """Return the files of each split that `datasets.save_to_disk` wrote, relative to a folder.

    Returns:
        {} if it wrote none. A dataset without splits is the split train.

    Raises:
        InputError: A file that lists them is damaged.
    """
    found = {}
    for path in sorted(folder.glob(f"*/{SAVED}" if (folder / SAVED_SPLITS).is_file() else SAVED)):
        prefix = path.relative_to(folder).parent
        try:
            names = [str(each["filename"]) for each in json.loads(path.read_bytes())["_data_files"]]
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            raise InputError(f"{prefix / SAVED} is damaged: save the dataset again") from None
        if any(os.path.basename(name) != name for name in names):
            raise InputError(f"{prefix / SAVED} names files of other folders")
        # A split without rows has no files.
        if names:
            found[prefix.name or "train"] = [str(prefix / name) for name in names]
    return found


def check_kinds(paths: Iterable[str | Path]) -> None:
    """Raise InputError for a file of a kind that is not read."""
    for path in paths:
        if kind_of(path) is None:
            raise InputError(f"{path}: unknown kind of file, expected {EXPECTED_KINDS}")


def _listed(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1:,} more"


def matches(path: str, glob: str) -> bool:
    """Return whether a path matches a glob in which ** matches folders, as in pathlib."""
    return _pattern(glob).fullmatch(path) is not None


@cache
def _pattern(glob: str) -> re.Pattern[str]:
    patterns = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?)", glob)
    return re.compile("".join(patterns.get(piece, re.escape(piece)) for piece in pieces))
