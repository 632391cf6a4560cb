"""The splits of a folder or a repository, as the datasets library finds them.

Its import takes a second: planning asks a process of its own, which runs main().
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

from snakechat.workflow.errors import InputError

# Where the library sees the files: in a file system of names alone.
ROOT = "names://dataset"
# Characters of an error of the library, which explains with examples.
MAX_REASON = 150
SCRIPTS = Path(__file__).resolve().parents[2]


def resolve_splits(paths: Sequence[str], configs: Any, name: str | None) -> dict[str, list[str]]:
    """Return the files of each split: train, validation, test, or as a card calls them.

    Args:
        paths: The files with rows, relative to the folder.
        configs: What the card says of configs, or None.
        name: The config of the card or, without configs, the folder that is read; None for the
            default config or all folders.

    Raises:
        InputError: There is no such config, or the card names no files.
    """
    from datasets.data_files import get_data_patterns, resolve_pattern, sanitize_patterns

    folder, patterns = _chosen_config(paths, configs, name)
    for path in (folder, *_texts(patterns)):
        if "://" in path or path.startswith("/") or ".." in path.split("/"):
            raise InputError(f"the card names {path!r}: expected files of the repository")
    _serve_names(paths)
    base = f"{ROOT}/{folder}".rstrip("/")
    try:
        of_splits = sanitize_patterns(patterns) if patterns else get_data_patterns(base)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InputError(f"the card has invalid data_files: {error}") from None
    splits = {}
    for split, globs in of_splits.items():
        found: set[str] = set()
        for glob in globs:
            # A pattern may match nothing.
            with suppress(FileNotFoundError):
                found |= {path.removeprefix(f"{ROOT}/") for path in resolve_pattern(glob, base)}
        if found:
            splits[str(split)] = sorted(found)
    return splits


def _serve_names(paths: Sequence[str]) -> None:
    """Make a file system of ROOT's protocol that has these files, of which it knows the names."""
    import fsspec

    protocol, _, root = ROOT.partition("://")
    files = {f"{root}/{path}": {"name": f"{root}/{path}", "type": "file"} for path in paths}

    class Names(fsspec.AbstractFileSystem):
        cachable = False

        def find(self, path: str, *_: Any, **__: Any) -> dict[str, Any]:
            start = path.rstrip("/") + "/"
            return {name: info for name, info in files.items() if name.startswith(start)}

        def info(self, path: str, **_: Any) -> dict[str, Any]:
            if path not in files:
                raise FileNotFoundError(path)
            return files[path]

    Names.protocol = protocol
    fsspec.register_implementation(protocol, Names, clobber=True)


def _chosen_config(paths: Sequence[str], configs: Any, name: str | None) -> tuple[str, Any]:
    """Return the folder and the patterns of the files of a config; no patterns for the default."""
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCardData

    # The types of columns are of no use here.
    if isinstance(configs, list):
        configs = [
            {key: value for key, value in config.items() if key != "features"}
            for config in configs
            if isinstance(config, dict)
        ]
    try:
        found = MetadataConfigs.from_dataset_card_data(DatasetCardData(configs=configs or []))
        chosen = name or found.get_default_config_name()
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:MAX_REASON]
        raise InputError(f"the card has invalid configs: {reason}") from None
    if not found:
        if name is not None and not any(path.startswith(f"{name}/") for path in paths):
            raise InputError(f"name: expected a config of the card or a folder, found {name}")
        return name or "", None
    if chosen not in found:
        problem = "several configs" if chosen is None else f"no config {chosen}"
        raise InputError(f"the card has {problem}: set name to one of {', '.join(found)}")
    return found[chosen].get("data_dir") or "", found[chosen].get("data_files")


def _texts(patterns: Any) -> list[str]:
    """Return all texts in lists and objects."""
    if isinstance(patterns, dict):
        patterns = list(patterns.values())
    if isinstance(patterns, list):
        return [text for each in patterns for text in _texts(each)]
    return [] if patterns is None else [str(patterns)]


def splits_in_child(paths: Sequence[str], configs: Any, name: str | None) -> dict[str, list[str]]:
    """Return what resolve_splits does, from another process.

    Raises:
        InputError: As resolve_splits.
    """
    return _ask(json.dumps([paths, configs, name], default=str))


@cache
def _ask(request: str) -> dict[str, list[str]]:
    # -P: no module of the working directory takes the place of a library.
    process = subprocess.run(
        [sys.executable, "-P", "-m", "snakechat.data.resolution"],
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
    # The package without its __init__, which would import all of its modules: half of the time.
    spec = find_spec("datasets")
    if spec is None:
        sys.exit("datasets is not installed: pip install -r requirements.txt")
    package = module_from_spec(spec)
    package.__dict__["__version__"] = version("datasets")
    sys.modules["datasets"] = package
    try:
        json.dump(resolve_splits(*json.load(sys.stdin)), sys.stdout)
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
