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
KINDS = re.compile(r"\.(parquet|arrow|jsonl\.gz|jsonl|json|csv)(\?download=true)?$")
EXPECTED_KINDS = "parquet, arrow, jsonl, jsonl.gz, json or csv"
# Words in a path that name its split. eval reads validation files, or test files if there are none.
SPLIT_WORDS = {
    **dict.fromkeys(["train", "training"], "train"),
    **dict.fromkeys(["validation", "valid", "val", "dev", "eval", "evaluation"], "validation"),
    **dict.fromkeys(["test", "testing"], "test"),
}
# Files that the datasets library writes next to the rows.
METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
# Files next to the rows that describe, load or picture them.
WITHOUT_ROWS = re.compile(
    r"(readme|license|licence|notice|citation|changelog)(\..*)?|.*\.(md|rst|py|cff|png|jpe?g|svg)"
)
# Folders that link to one another have as many paths as they have orders.
MAX_LINKED_FOLDERS = 10_000
SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\b")


def kind_of(path: str | Path) -> str | None:
    """Return parquet, arrow, jsonl.gz, jsonl, json or csv, or None for a file of another kind."""
    match = KINDS.search(os.path.basename(path).lower())
    return match[1] if match else None


def local_paths(folder: str | Path, follow_links: bool = True) -> list[str]:
    """Return the sorted paths of all files in a folder, relative to it.

    The folder may be a link itself. Links to folders are followed, unless they lead to a folder
    that contains them.

    follow_links: Whether links to folders may lead out of the folder.

    Raises:
        InputError: A link to a folder leads out of it, or links lead to too many folders.
    """
    paths: list[str] = []
    # Prefix of the paths in a folder, and the real paths of the folder and of those above it.
    pending: list[tuple[str, tuple[str, ...]]] = [("", (os.path.realpath(folder),))]
    num_linked = 0
    while pending:
        prefix, chain = pending.pop()
        for entry in _entries(chain[-1]):
            # A link to itself is an error for is_dir.
            is_link = entry.is_symlink()
            if not (os.path.isdir(entry.path) if is_link else entry.is_dir()):
                paths.append(prefix + entry.name)
                continue
            real = entry.path
            if is_link:
                real = os.path.realpath(real)
                num_linked += 1
                if num_linked > MAX_LINKED_FOLDERS:
                    raise InputError(f"links lead to more than {MAX_LINKED_FOLDERS:,} folders")
                if not follow_links and not entry.name.startswith("."):
                    check_link(folder, prefix + entry.name)
            # A link to a parent folder would lead into an endless loop.
            if real not in chain:
                pending.append((f"{prefix}{entry.name}/", (*chain, real)))
    return sorted(paths)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; none of a folder that cannot be read, such as lost+found."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def check_link(folder: str | Path, path: str) -> None:
    """Raise InputError if a path in a folder is a link that leads out of the folder.

    In the cache of huggingface_hub, links may lead from snapshots/COMMIT to blobs.
    """
    link = os.path.join(folder, path)
    if not os.path.islink(link):
        return
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(link))
    roots = [root]
    for parent in root.parents:
        if root.relative_to(parent).parts[0] == "snapshots":
            roots.append(parent / "blobs")
    if not any(map(target.is_relative_to, roots)):
        raise InputError(
            f"{path} is a link to {target}, outside of the folder: set follow_links: true to read"
            " what it leads to"
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
        # A glob without a star may select a single shard on purpose.
        if "*" in globs.get(split, "*"):
            _check_shards(matched)
    if overlap := set(splits["train"]) & set(splits.get("eval", [])):
        raise InputError(
            f"{min(overlap)} is both in the train and in the eval split: narrow the globs train:"
            " or eval:"
        )
    return splits


def _no_training_files(paths: Iterable[str], splits: Mapping[str, Sequence[str]]) -> str:
    """Return the error about a folder without training files."""
    if held_out := splits.get("eval"):
        return (
            f"no training files: {_listed(held_out)} was read as eval, because of the split in its"
            f" path: rename it, or set train: {held_out[0]}"
        )
    others = _other_files(paths)
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
    """Return a remark on files that may have rows and belong to no split, or None without any.

    Test files beside validation files are held out on purpose.

    Args:
        paths: All files of a folder or repository.
        splits: What split_files returns for them without a glob.
    """
    assigned = {path for files in splits.values() for path in files}
    unread = [path for path in _data_files(paths) if path not in assigned]
    nameless = [path for path in unread if not _named_split(path)]
    remarks = []
    if nameless:
        remarks.append(
            f"{_listed(nameless)}, because other files have train in their path: rename them, or"
            " select the files by train:"
        )
    if others := _other_files(paths):
        remarks.append(f"{_listed(others)}: expected {EXPECTED_KINDS}: convert or delete it")
    return f"not read: {'; '.join(remarks)}" if remarks else None


def _other_files(paths: Iterable[str]) -> list[str]:
    """Return the files that may have rows and are of no kind that is read."""
    return [
        path
        for path in _visible_files(paths)
        if not kind_of(path) and not WITHOUT_ROWS.fullmatch(path.rpartition("/")[2].lower())
    ]


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
