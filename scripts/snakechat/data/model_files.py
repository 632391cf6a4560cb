"""Which files of a folder or repository belong to a base model.

Standard library only: the workflow imports this module while it plans.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase

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
