"""Which files of a dataset make its parts, train and eval, told by their paths.

Standard library only: the workflow imports this module while it plans.
"""

import os
import re
from pathlib import Path

from rlhf.job import InputError

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
    match = KINDS.search(os.path.basename(path))
    return match[1] if match else None


def local_paths(folder):
    """Paths of all files in a folder, relative to it, behind links too."""
    paths = (
        Path(parent, name).relative_to(folder).as_posix()
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
    )
    return sorted(paths)


def parts_of(paths, globs):
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
        if not found:
            asked = f" matches {globs[part]!r}" if part in globs else " is parquet, json or csv"
            raise InputError(f"{part}: no file{asked}")
        _check_shards(found)
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
    pattern = re.escape(glob).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
    return re.fullmatch(pattern.replace(r"\?", "[^/]"), path) is not None


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
