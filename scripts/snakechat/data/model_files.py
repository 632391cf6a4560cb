"""The files of a model: which ones belong to it, and what kind of model its config names.

Standard library only: the workflow imports this module while it plans.
"""

import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

# The card of a repository, which names its licence.
CARD = "README.md"


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
    return weights + matching("*.json", "*.txt", "*.model", "*.jinja", CARD)


def read_model_config(folder: Path) -> dict[str, Any] | None:
    """Return config.json of a model folder, or None if it cannot be read."""
    try:
        keys = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return keys if isinstance(keys, dict) else None


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Return whether config.json names the architecture of a sequence classifier."""
    architectures = config.get("architectures") or ()
    return any(name.endswith("ForSequenceClassification") for name in architectures)


def reward_model_problem(config: Mapping[str, Any]) -> str | None:
    """Return why a model cannot score responses, given its config.json; None if it may."""
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


def language_model_problem(config: Mapping[str, Any]) -> str | None:
    """Return why a model cannot generate or be trained, given its config.json; None if it can."""
    if is_classifier(config):
        return (
            "is a sequence classifier, expected a language model: use it as a reward model"
            " (reward: models/NAME), or use another model here"
        )
    return None
