"""Which files of a folder or repository a base model is read from.

Standard library only: the workflow imports this module while it plans.
"""

from fnmatch import fnmatchcase

# Where a repository says what may be done with it.
CARD = "README.md"


def model_files(paths):
    """Config, tokenizer, card, and weights: in torch's format only where there are no others.

    paths: of all files, relative to the folder; those in subfolders are other forms of the model.
    """

    def matching(*patterns):
        top = [path for path in paths if "/" not in path]
        return [path for path in top if any(fnmatchcase(path, pattern) for pattern in patterns)]

    weights = matching("*.safetensors") or matching("pytorch_model*.bin")
    return weights + matching("*.json", "*.txt", "*.model", "*.jinja", CARD)
