"""Which files of a dataset belong to its splits, train and eval.

The datasets library finds its own splits, whose names differ. Its import takes a second, and
planning imports this module: another process runs main().
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from snakechat.workflow.errors import InputError, warn
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
HIDDEN = re.compile(r"(^|/)(\.|cache-[0-9a-f]{16}|(dataset_infos?|state|dataset_dict)\.json$)")
# What is not data beside files with rows: documents, code, pictures, names such as LICENSE.
DOCUMENTS = re.compile(
    r"\.(md|rst|pdf|html?|ya?ml|toml|cff|bib|py|ipynb|sh|lock|png|jpe?g|gif|svg|webp)$"
    r"|(^|/)(_[^/]*|[A-Z][A-Z_-]*(\.txt)?|Makefile|Dockerfile)$"
)
# Where the library sees the files, of which it knows the names alone.
ROOT = "memory:///dataset"
SCRIPTS = Path(__file__).resolve().parents[2]


def kind_of(path: str | Path) -> str | None:
    """Return one of EXPECTED_KINDS, of which text may be compressed, or None for another kind."""
    match = KINDS.search(os.path.basename(path).lower())
    kind = match and (match[1] or match[2])
    return "jsonl" if kind in ("ndjson", "jsonlines") else kind


def checked_kind(path: str | Path) -> str:
    """Return the kind of a file; raise InputError if such files are not read."""
    if kind := kind_of(path):
        return kind
    raise InputError(f"{path}: unknown kind of file, expected {EXPECTED_KINDS}")


def local_paths(folder: str | Path) -> list[str]:
    """Return the sorted paths of all files in a folder, which may be a link, relative to it.

    A link to a folder is an error: the folder could contain itself, or a file twice.
    """
    paths = []
    for parent, folders, names in os.walk(folder):
        paths += [os.path.relpath(os.path.join(parent, name), folder) for name in names]
        for link in (os.path.join(parent, name) for name in folders):
            path = os.path.relpath(link, folder)
            if os.path.islink(link) and not HIDDEN.search(path):
                raise InputError(
                    f"{path} is a link to a folder: name what it leads to as `path`, or copy it"
                    " there"
                )
    return sorted(paths)


def check_sources(folder: Path, paths: Iterable[str]) -> None:
    """Raise InputError if a path in a folder is not a file, or is a link that leads out of it.

    Reading a named pipe or a device would not end. In the cache of huggingface_hub, links may lead
    from snapshots/COMMIT to blobs; in output/, to results.
    """
    root = folder.resolve()
    blobs = [parent.with_name("blobs") for parent in root.parents if parent.name == "snapshots"]
    for path in paths:
        target = Path(os.path.realpath(folder / path))
        # Other bytes are halves of surrogate pairs in the name, and pyarrow opens no such file.
        if not target.is_file() or re.search("[\ud800-\udfff]", path):
            raise InputError(
                f"{path} is a broken link, is not a regular file, or has a name that is not UTF-8:"
                " remove or rename it"
            )
        is_inside = any(map(target.is_relative_to, [root, *blobs]))
        if not is_inside and not any((parent / MANIFEST).is_file() for parent in target.parents):
            raise InputError(
                f"{path} is a link to {target}, outside of the folder: name what it leads to as"
                " `path`, or copy it there"
            )


def split_files(
    paths: Sequence[str], source: Mapping[str, Any], configs: Any, place: str
) -> dict[str, list[str]]:
    """Return the files of train, and of eval if there is one; warn of files that are not read.

    The globs `train` and `eval` select them. Otherwise, the datasets library does, by the card or
    the names of the files: its split train, and validation or else test, unless `split` names
    others.

    Args:
        paths: All files of a folder or repository, relative to it.
        source: train, eval, name and split of a dataset in the config, as far as they are set.
        configs: What the card says of configs, or None.
        place: The dataset, for the warning.
    """
    if "train" in source:
        globs = {split: source[split] for split in ("train", "eval") if split in source}
        splits = {split: [p for p in paths if matches(p, glob)] for split, glob in globs.items()}
        for split, files in splits.items():
            if not files:
                raise InputError(f"{split}: no file matches {globs[split]!r}")
    else:
        visible = [path for path in paths if not HIDDEN.search(path)]
        request = [path for path in visible if kind_of(path)], configs, source.get("name")
        found = splits_in_child(json.dumps(request, default=str))
        splits = train_and_eval(found, source.get("split", {}), visible)
        assigned = {*chain(*found.values())}
        unread = [p for p in visible if p not in assigned and not DOCUMENTS.search(p)]
        # A card, or the name of a folder, selects files on purpose.
        if unread and not configs and "name" not in source:
            warn(
                f"{place}: not read: {_listed(unread)}, of another kind or without a split in the"
                " name: rename them, or select the files by train:"
            )
    for files in splits.values():
        kinds = sorted(set(map(checked_kind, files)))
        if len(kinds) > 1:
            raise InputError(
                f"files of several kinds ({', '.join(kinds)}): select the files to import by train:"
            )
        known: dict[str, str] = {}
        for path in files:
            if (first := known.setdefault(KINDS.sub("", path), path)) != path:
                raise InputError(f"{first} and {path} have the same name: remove one of them")
    if overlap := set(splits["train"]) & set(splits.get("eval", [])):
        raise InputError(
            f"{min(overlap)} is both in the train and in the eval split: rename it, or set train:"
            " and eval:"
        )
    return splits


def train_and_eval(
    found: Mapping[str, list[str]], wanted: Mapping[str, str], visible: Sequence[str]
) -> dict[str, list[str]]:
    """Return the files of train and eval, or raise InputError.

    Args:
        found: The files of each split of the datasets library.
        wanted: Names of these splits by train and eval.
        visible: All files, for errors.
    """
    if not found:
        raise InputError(
            f"no training files: expected {EXPECTED_KINDS}"
            + (f", found {_listed(visible)}" if visible else "")
        )
    train = wanted.get("train", "train")
    held_out = [split for split in ("validation", "test") if split in found and split != train]
    names = {"train": train} | ({"eval": held_out[0]} if held_out else {}) | dict(wanted)
    for split, name in names.items():
        if name not in found:
            shown = ", ".join(f"{known} ({_listed(files)})" for known, files in found.items())
            raise InputError(
                f"no files of the split {name}, found {shown}: set split: {{{split}: NAME}}, or"
                " select the files by train:"
            )
    return {split: found[name] for split, name in names.items()}


def saved_splits(folder: Path) -> dict[str, list[str]]:
    """Return the files of each split that `datasets.save_to_disk` wrote, relative to a folder.

    A dataset without splits is the split train.
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


def _listed(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1:,} more"


def matches(path: str, glob: str) -> bool:
    """Return whether a path matches a glob in which ** matches folders, as in pathlib."""
    patterns = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?)", glob)
    pattern = "".join(patterns.get(piece, re.escape(piece)) for piece in pieces)
    return re.fullmatch(pattern, path) is not None


# --- the splits of the datasets library -----------------------------------------------------


def resolve_splits(paths: Sequence[str], configs: Any, name: str | None) -> dict[str, list[str]]:
    """Return the files of each split: train, validation, test, or as a card calls them.

    Args:
        paths: The files with rows, relative to the folder.
        configs: What the card says of configs, or None.
        name: The config of the card or, without configs, the folder that is read; None for the
            default config or all folders.

    Raises:
        InputError: The card has invalid configs, or not the one that is read.
    """
    try:
        return _matching_files(paths, *_chosen_config(paths, configs, name))
    except (ValueError, TypeError, AttributeError) as error:
        # The library explains with examples.
        reason = " ".join(str(error).split())[:150]
        raise InputError(f"the card has invalid configs: {reason}") from None


def _chosen_config(paths: Sequence[str], configs: Any, name: str | None) -> tuple[str, Any]:
    """Return the folder and the patterns of the splits of a config; no patterns for the default."""
    from datasets.data_files import sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs

    if isinstance(configs, list):
        # Old cards have a list of names. The types of columns are of no use here.
        configs = [{**each, "features": []} for each in configs if isinstance(each, dict)]
    known = MetadataConfigs.from_dataset_card_data({"configs": configs})
    if not known:
        if name is not None and not any(path.startswith(f"{name}/") for path in paths):
            raise InputError(f"name: expected a config of the card or a folder, found {name}")
        return name or "", {}
    chosen = name or known.get_default_config_name()
    if chosen not in known:
        problem = "several configs" if chosen is None else f"no config {chosen}"
        raise InputError(f"the card has {problem}: set name to one of {', '.join(map(str, known))}")
    patterns = known[chosen].get("data_files")
    return known[chosen].get("data_dir") or "", sanitize_patterns(patterns) if patterns else {}


def _matching_files(paths: Sequence[str], folder: str, patterns: Any) -> dict[str, list[str]]:
    """Return the files of each split in a folder, by its patterns or, without any, by names."""
    from datasets.data_files import get_data_patterns, resolve_pattern
    from fsspec.implementations.memory import MemoryFileSystem

    for path in map(str, [folder, *chain(*patterns.values())]):
        if "://" in path or path.startswith("/") or ".." in path.split("/"):
            raise InputError(f"the card names {path!r}: expected files of the repository")
    files, base = MemoryFileSystem(), f"{ROOT}/{folder}".rstrip("/")
    files.store.clear()
    for path in paths:
        files.pipe_file(f"{ROOT}/{path}", b"")
    splits: dict[str, set[str]] = {}
    # A folder may have no files, and a pattern may match nothing.
    with suppress(FileNotFoundError):
        patterns = patterns or get_data_patterns(base)
    for split, glob in [(split, glob) for split, globs in patterns.items() for glob in globs]:
        with suppress(FileNotFoundError):
            found = [path.removeprefix(f"{ROOT}/") for path in resolve_pattern(glob, base)]
            splits.setdefault(str(split), set()).update(found)
    return {split: sorted(found) for split, found in splits.items()}


@cache
def splits_in_child(request: str) -> dict[str, list[str]]:
    """Return what resolve_splits does, from another process; its arguments are a list as JSON."""
    # -P: no module of the working directory takes the place of a library.
    process = subprocess.run(
        [sys.executable, "-P", "-m", "snakechat.data.dataset_files"],
        input=request,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise InputError((process.stderr.strip() or "the datasets library failed").splitlines()[-1])
    return dict(json.loads(process.stdout))


def main() -> None:
    """Read a request of splits_in_child, and write the splits, or an error as the last line."""
    try:
        json.dump(resolve_splits(*json.load(sys.stdin)), sys.stdout)
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
