"""Which files of a dataset make its parts, train and eval, told by their paths.

Standard library only: the workflow imports this module while it plans.
"""

import os
import re
from pathlib import Path

from snakechat.workflow.errors import InputError

# wget leaves the question mark of a hub's download address in the name.
KINDS = re.compile(r"\.(parquet|arrow|jsonl\.gz|jsonl|json|csv)(\?download=true)?$")
WORDS = {
    **dict.fromkeys(["train", "training"], "train"),
    **dict.fromkeys(["validation", "valid", "val", "dev", "eval", "evaluation"], "validation"),
    **dict.fromkeys(["test", "testing"], "test"),
}
# What Hugging Face's datasets library writes beside the rows.
ABOUT = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\b")


def kind_of(path):
    """parquet, arrow, jsonl.gz, jsonl, json or csv; None for a file of another kind."""
    match = KINDS.search(os.path.basename(path).lower())
    return match[1] if match else None


def local_paths(folder):
    """Paths of all files in a folder, relative to it, behind links too."""
    paths = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        # Links that lead back up would lead round and round.
        here = Path(parent).resolve()
        folders[:] = [name for name in folders if not here.is_relative_to((here / name).resolve())]
        paths += [Path(parent, name).relative_to(folder).as_posix() for name in names]
    return sorted(paths)


def split_files(paths, globs):
    """{"train": paths, "eval": paths} of a dataset, sorted; without "eval" where it has none.

    paths: all files of a folder or repository, relative to it. globs: a glob for "train", and for
    "eval", where the config has them. Without a glob for train, a file belongs to the part whose
    name stands last in its path (data/train-0.parquet), and to train where none stands in any.
    eval is then validation, or else test. Raises InputError where a part has no file or a shard is
    missing, or where it is not clear which files are meant.
    """
    if "train" in globs:
        parts = {part: [p for p in paths if matches(p, glob)] for part, glob in globs.items()}
    else:
        parts = _named_parts(paths)
    for part, found in parts.items():
        if not found and part in globs:
            raise InputError(f"{part}: no file matches {globs[part]!r}")
        if not found:
            raise InputError(f"{part}: no parquet, jsonl, json, csv or arrow file to train on")
        # A glob without a star may mean one shard.
        if "*" in globs.get(part, "*"):
            _check_shards(found)
    if twice := set(parts["train"]) & set(parts.get("eval", [])):
        raise InputError(f"{min(twice)} would be trained and evaluated on: narrow train: or eval:")
    return parts


def _named_parts(paths):
    data = [
        path
        for path in paths
        if kind_of(path)
        and path.rpartition("/")[2] not in ABOUT
        # Hidden folders (.git), and what datasets' map() left in a folder of its own.
        and not re.search(r"(^|/)(\.|cache-)", path)
    ]
    kinds = sorted({kind_of(path) for path in data})
    if len(kinds) > 1:
        raise InputError(f"files of several kinds ({', '.join(kinds)}): name those meant by train:")
    named = {"train": [], "validation": [], "test": [], None: []}
    for path in data:
        words = [WORDS[word] for word in re.findall(r"[a-z]+", path.lower()) if word in WORDS]
        named[words[-1] if words else None].append(path)
    parts = {"train": named["train"] or named[None]}
    held_out = named["validation"] or named["test"]
    return parts | ({"eval": held_out} if held_out else {})


def matches(path, glob):
    """Whether a path matches a glob in which ** stands for folders, as in pathlib."""
    stands_for = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?)", glob)
    pattern = "".join(stands_for.get(piece, re.escape(piece)) for piece in pieces)
    return re.fullmatch(pattern, path) is not None


def _check_shards(paths):
    """A part of which a download or a copy left out one file would be used without a word."""
    shards = {}
    for path in paths:
        if match := SHARD.match(path):
            shards.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (name, number), found in shards.items():
        # Counted from 0, or from 1 by some.
        missing = set(range(min(found | {1}), min(found | {1}) + number)) - found
        if missing:
            raise InputError(
                f"{name}: {len(found)} of {number} shards, number {min(missing)} is missing"
            )
