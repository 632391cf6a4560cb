"""The files of a model: which ones belong to it, and what kind of model its config names.

Standard library only: the workflow imports this module while it plans.
"""

import json
import zipfile
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from snakechat.workflow.errors import InputError

# The card of a repository, which names its licence.
CARD = "README.md"
# The text files that tokenizers of transformers are read from; others are for people.
TEXTS = ("vocab.txt", "merges.txt", "dict.txt")
# The start of the text that Git without LFS has in place of a large file.
LFS_POINTER = b"version https://git-lfs"
# Bytes of a header of safetensors, as the library limits them.
MAX_HEADER = 100_000_000


def model_files(paths: Iterable[str]) -> list[str]:
    """Select weights, config, tokenizer and card.

    Weights in PyTorch's format are selected only if there are no safetensors. Files in subfolders
    are other forms of the model and never selected.

    paths: All files, relative to the folder.
    """
    top = [path for path in paths if "/" not in path]

    def matching(*patterns: str) -> list[str]:
        return [path for path in top if any(fnmatchcase(path, pattern) for pattern in patterns)]

    weights = matching("*.safetensors") or matching("pytorch_model*.bin")
    return weights + matching("*.json", *TEXTS, "*.model", "*.jinja", CARD)


def check_files(folder: Path) -> None:
    """Check that the files of a model were downloaded completely, as far as their starts show.

    Raises:
        InputError: A file is missing or truncated, or is a pointer of Git LFS.
    """
    names = {path.name for path in folder.iterdir()}
    for name in sorted(names):
        _check_file(folder / name)
    if "config.json" not in names:
        raise InputError("config.json is missing: add it from the repository of the model")
    if "tokenizer.json" in names or any(name.endswith(".model") for name in names):
        return
    pair = {"vocab.json", "merges.txt"}
    if len(found := pair & names) == 1:
        [missing], [other] = pair - found, found
        raise InputError(
            f"{missing} is missing beside {other}: add it from the repository of the model"
        )
    if not names & {*pair, *TEXTS}:
        raise InputError(
            "the tokenizer is missing: expected tokenizer.json, vocab.json and merges.txt, or"
            " tokenizer.model: add them from the repository of the model"
        )


def _check_file(path: Path) -> None:
    """Raise InputError if a file is a pointer of Git LFS, is truncated, or should be JSON."""
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            raise InputError(
                f"{path.name} is a Git LFS pointer instead of the file: run git lfs pull in its"
                " repository"
            )
        if path.suffix == ".json":
            _check_json(path)
        # The end of a zip file, as torch saves weights, has the list of its parts.
        if path.suffix == ".bin" and start.startswith(b"PK") and not zipfile.is_zipfile(path):
            raise InputError(
                f"{path.name} is truncated at {path.stat().st_size:,} bytes: download it again"
            )
        if path.suffix != ".safetensors":
            return
        size = int.from_bytes(start[:8], "little")
        file.seek(8)
        header = file.read(min(size, MAX_HEADER))
    try:
        tensors = [of for name, of in json.loads(header).items() if name != "__metadata__"]
        expected = 8 + size + max((of["data_offsets"][1] for of in tensors), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        # safetensors describes what is wrong, unless the header is incomplete.
        expected = 8 + size if size <= MAX_HEADER else 0
    found = path.stat().st_size
    if found < expected:
        raise InputError(
            f"{path.name} is truncated: it has {found:,} of {expected:,} bytes: download it again"
        )


def _check_json(path: Path) -> None:
    """Raise InputError if a file is not JSON."""
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path.name} is damaged ({error}): download it again") from None


def load_pretrained(auto_class: Any, folder: str | Path, **arguments: Any) -> Any:
    """Load a config, tokenizer or model of a folder by an auto class of transformers.

    Code of the folder never runs. By default, transformers asks on the terminal whether it may, and
    the answer may be a text that is meant for something else.

    Raises:
        InputError: transformers rejects the folder.
    """
    try:
        return auto_class.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **arguments
        )
    except ValueError as error:
        raise InputError(f"{folder}: {str(error).splitlines()[0]}") from None


def read_model_config(folder: Path) -> dict[str, Any] | None:
    """Return config.json of a model folder, or None if it cannot be read."""
    try:
        keys = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return keys if isinstance(keys, dict) else None


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Return whether config.json names the architecture of a sequence classifier."""
    architectures = config.get("architectures") or ()
    return any(name.endswith("ForSequenceClassification") for name in architectures)


def reward_model_problem(config: Mapping[str, Any]) -> str | None:
    """Return why a model cannot score responses, given its config.json; None if it may."""
    if problem := multimodal_problem(config):
        return problem
    if not config.get("architectures"):
        return None
    if not is_classifier(config):
        found = ", ".join(config["architectures"])
        return (
            f"is no classifier but {found}: use a sequence classifier with one label, or train a"
            " reward recipe on it"
        )
    # transformers does not write its default of two labels.
    labels = len(config.get("id2label") or ()) or config.get("num_labels", 2)
    if labels != 1:
        return f"has {labels} labels, expected 1, the score: use another classifier"
    return None


def multimodal_problem(config: Mapping[str, Any]) -> str | None:
    """Return that a model reads more than text, given its config.json; None if it does not."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return None
    name = text.get("model_type") or "its text model"
    return (
        f"is a multimodal model ({config.get('model_type')}), expected a model of text only: use a"
        f" checkpoint of {name}"
    )


def language_model_problem(config: Mapping[str, Any]) -> str | None:
    """Return why a model cannot generate or be trained, given its config.json; None if it can."""
    if is_classifier(config):
        return (
            "is a sequence classifier, expected a language model: use it as a reward model"
            " (reward: models/NAME), or use another model here"
        )
    return multimodal_problem(config)
