"""The files of a model: which ones belong to it, and what kind of model its config names.

Standard library only: the workflow imports this module while it plans.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
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
# One of these, tokenizer.json or a *.model has the vocabulary of a tokenizer; both of BYTE_PAIRS.
TOKENIZERS = ("vocab.json", *TEXTS)
BYTE_PAIRS = {"vocab.json", "merges.txt"}
# Layers of a model: more than any published one has, and few enough to be made in time.
MAX_LAYERS = 1000


def model_files(paths: Iterable[str], all_formats: bool = False) -> list[str]:
    """Select weights, config and tokenizer.

    Files in subfolders are other forms of the model, and the files of an adapter belong to another
    model: they are never selected.

    Args:
        paths: All files, relative to the folder.
        all_formats: Select weights in PyTorch's format even if there are safetensors.
    """
    top = [path for path in paths if "/" not in path and not path.startswith("adapter_")]

    def matching(*patterns: str) -> list[str]:
        return [path for path in top if any(fnmatchcase(path, pattern) for pattern in patterns)]

    safetensors, torch_files = matching("*.safetensors"), matching("pytorch_model*.bin")
    weights = safetensors + torch_files if all_formats else safetensors or torch_files
    return weights + matching("*.json", *TEXTS, "*.model", "*.jinja")


def is_pointer(path: Path) -> bool:
    """Return whether a file is what Git without LFS has in place of a large file."""
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def check_files(folder: Path) -> None:
    """Raise InputError for a damaged or missing file, which the libraries may not name."""
    names = {path.name for path in folder.iterdir()}
    for name in sorted(names):
        if is_pointer(folder / name):
            raise InputError(
                f"{name} is a Git LFS pointer instead of the file: run git lfs pull in its"
                " repository"
            )
        if name.endswith(".json"):
            try:
                content = json.loads((folder / name).read_bytes())
                if name == "config.json" and (problem := layers_problem(content)):
                    raise InputError(f"config.json has {problem}")
            except (ValueError, RecursionError) as error:
                raise InputError(f"{name} is damaged ({error}): download it again") from None
    missing = {"config.json"} - names
    if "tokenizer.json" not in names and not any(name.endswith(".model") for name in names):
        # transformers would make an empty one.
        if names.isdisjoint(TOKENIZERS):
            missing |= {"the tokenizer (tokenizer.json, vocab.json with merges.txt, or a *.model)"}
        elif not names.isdisjoint(BYTE_PAIRS):
            missing |= BYTE_PAIRS - names
    if missing:
        raise InputError(f"{min(missing)} is missing: add it from the repository of the model")


def layers_problem(config: Any) -> str | None:
    """Return which number of layers in a config is too large, or None.

    Names of the key differ, and a config may contain others: transformers makes lists of that
    length when it reads one, and models of that many layers for hours.
    """
    for key, value in config.items() if isinstance(config, Mapping) else ():
        # Not vocab_size_per_layer_input.
        is_number = key.endswith(("layers", "layer")) and isinstance(value, int | float)
        if is_number and value > MAX_LAYERS:
            return f"{key}: {value}, expected at most {MAX_LAYERS}"
        if problem := layers_problem(value):
            return problem
    return None


def load_pretrained(auto_class: Any, folder: str | Path, **arguments: Any) -> Any:
    """Load a config, tokenizer or model of a folder by an auto class of transformers.

    Code of the folder never runs. By default, transformers asks on the terminal whether it may, and
    the answer may be a text that is meant for something else.
    """
    try:
        return auto_class.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **arguments
        )
    except ValueError as error:
        raise InputError(f"{folder}: {str(error).splitlines()[0]}") from None


def read_model_config(folder: Path) -> dict[str, Any] | None:
    """Return config.json of a model folder, or None if it cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        keys = json.loads((folder / "config.json").read_text())
        return keys if isinstance(keys, dict) else None
    return None


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Return whether config.json names the architecture of a sequence classifier."""
    return any(
        name.endswith("ForSequenceClassification") for name in config.get("architectures") or ()
    )


def model_problem(config: Mapping[str, Any], scores: bool) -> str | None:
    """Return why a model does not fit its use, given its config.json; None if it may.

    scores: Whether it must score responses; otherwise, it must generate or be trained.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        return (
            f"is a multimodal model ({config.get('model_type')}), expected a model of text only:"
            f" use a checkpoint of {text.get('model_type') or 'its text model'}"
        )
    if not scores and is_classifier(config):
        return (
            "is a sequence classifier, expected a language model: use it as a reward model"
            " (reward: models/NAME), or use another model here"
        )
    if not scores or not config.get("architectures"):
        return None
    if not is_classifier(config):
        return (
            f"is {', '.join(config['architectures'])}, expected a sequence classifier with one"
            " label: use one, or train a reward recipe on it"
        )
    # transformers does not write its default of two labels.
    labels = len(config.get("id2label") or ()) or config.get("num_labels", 2)
    if labels != 1:
        return f"has {labels} labels, expected 1, the score: use another classifier"
    return None
