"""Which files of a dataset belong to its splits, train and eval, by their paths.

Standard library only: the workflow imports this module while it plans.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from snakechat.workflow.errors import InputError

# wget keeps the query of the hub's download links in file names.
KINDS = re.compile(
    r"\.(?:(parquet|arrow)|(jsonl|ndjson|jsonlines|json|csv|tsv)"
    r"(\.(gz|gzip|bz2|xz|zst|zstd|lz4))?)(\?download=true)?$"
)
EXPECTED_KINDS = "parquet, arrow, jsonl, json, csv or tsv"
# Words in a path that name its split. eval reads validation files, or test files if there are none.
SPLIT_WORDS = {
    **dict.fromkeys(["train", "training"], "train"),
    **dict.fromkeys(["validation", "valid", "val", "dev", "eval", "evaluation"], "validation"),
    **dict.fromkeys(["test", "testing"], "test"),
}
# Files that the datasets library writes next to the rows.
METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\b")


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

    In the cache of huggingface_hub, links may lead from snapshots/COMMIT to blobs.
    """
    link = Path(folder, path)
    if not link.is_symlink():
        return
    root, target = Path(folder).resolve(), Path(os.path.realpath(link))
    blobs = [parent.with_name("blobs") for parent in root.parents if parent.name == "snapshots"]
    if not any(map(target.is_relative_to, [root, *blobs])):
        raise InputError(
            f"{path} is a link to {target}, outside of the folder: name what it leads to as `path`"
        )


def split_files(paths: Sequence[str], globs: Mapping[str, str]) -> dict[str, list[str]]:
    """Assign files to the splits of a dataset.

    Without a glob for train, a file belongs to the split that the last split word in its path names
    (data/train-0.parquet); if no path has a split word, all files are train. eval consists of the
    validation files, or of the test files if there are none.

    Args:
        paths: All files of a folder or repository, relative to it.
        globs: Globs of the config by split: none, train, or train and eval.

    Returns:
        {"train": paths, "eval": paths} in the order of `paths`; without "eval" if the dataset has
        no such files.

    Raises:
        InputError: A split has no files or a missing shard, a file belongs to both splits, or the
            files are of several kinds.
    """
    if "train" in globs:
        splits = {split: [p for p in paths if matches(p, glob)] for split, glob in globs.items()}
    else:
        splits = _split_by_name(paths)
    for split, matched in splits.items():
        if not matched and split in globs:
            raise InputError(f"{split}: no file matches {globs[split]!r}")
        if not matched:
            raise InputError(_no_training_files(paths, splits))
        check_kinds(matched)
        # A glob without a star may select a single shard on purpose.
        if "*" in globs.get(split, "*"):
            _check_shards(matched)
    if overlap := set(splits["train"]) & set(splits.get("eval", [])):
        raise InputError(
            f"{min(overlap)} is both in the train and in the eval split: narrow the globs train:"
            " or eval:"
        )
    return splits


def check_kinds(paths: Iterable[str | Path]) -> None:
    """Raise InputError for a file of a kind that is not read."""
    for path in paths:
        if kind_of(path) is None:
            raise InputError(f"{path}: unknown kind of file, expected {EXPECTED_KINDS}")


def _no_training_files(paths: Iterable[str], splits: Mapping[str, Sequence[str]]) -> str:
    """Return the error about a folder without training files."""
    if held_out := splits.get("eval"):
        return (
            f"no training files: {_listed(held_out)} was read as eval, because of the split in its"
            f" path: rename it, or set train: {held_out[0]}"
        )
    others = _visible_files(paths)
    found = f", found {_listed(others)}" if others else ""
    return f"no training files: expected {EXPECTED_KINDS}{found}"


def _data_files(paths: Iterable[str]) -> list[str]:
    return [path for path in _visible_files(paths) if kind_of(path)]


def _visible_files(paths: Iterable[str]) -> list[str]:
    return [
        path
        for path in paths
        if path.rpartition("/")[2] not in METADATA
        # Hidden folders (.git), and the caches of datasets' map().
        and not re.search(r"(^|/)(\.|cache-)", path)
    ]


def _split_by_name(paths: Iterable[str]) -> dict[str, list[str]]:
    data_files = _data_files(paths)
    kinds = sorted({kind_of(path) or "" for path in data_files})
    if len(kinds) > 1:
        raise InputError(
            f"files of several kinds ({', '.join(kinds)}): select the files to import by train:"
        )
    by_word: dict[str, list[str]] = {"train": [], "validation": [], "test": [], "": []}
    for path in data_files:
        by_word[_named_split(path)].append(path)
    splits = {"train": by_word["train"] or by_word[""]}
    if held_out := by_word["validation"] or by_word["test"]:
        splits["eval"] = held_out
    return splits


def _named_split(path: str) -> str:
    """Return the split that the last split word in a path names, or an empty string."""
    words = [word for word in re.findall(r"[a-z]+", path.lower()) if word in SPLIT_WORDS]
    return SPLIT_WORDS[words[-1]] if words else ""


def unread_files(paths: Sequence[str], splits: Mapping[str, Sequence[str]]) -> str | None:
    """Return a remark on data files that belong to no split, or None without any.

    Test files beside validation files are held out on purpose.

    Args:
        paths: All files of a folder or repository.
        splits: What split_files returns for them without a glob.
    """
    assigned = {path for files in splits.values() for path in files}
    unread = [path for path in _data_files(paths) if path not in assigned]
    nameless = [path for path in unread if not _named_split(path)]
    if not nameless:
        return None
    return (
        f"not read: {_listed(nameless)}, because other files have train in their path: rename them,"
        " or select the files by train:"
    )


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


def _check_shards(paths: Iterable[str]) -> None:
    """Raise InputError if a shard is missing, as after an interrupted download."""
    shards: dict[tuple[str, int], set[int]] = {}
    for path in paths:
        if match := SHARD.match(path):
            shards.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (name, count), numbers in shards.items():
        # Shards are numbered from 0 or from 1.
        first = min(numbers | {1})
        if missing := set(range(first, first + count)) - numbers:
            raise InputError(
                f"{name}: {len(numbers)} of {count} shards found, shard {min(missing)} is missing"
            )
