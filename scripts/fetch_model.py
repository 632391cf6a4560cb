"""Fetch a base model and its tokenizer from the hub, as safetensors."""

from fnmatch import fnmatchcase

from rlhf.hub import CARD, fetch, licence_of
from rlhf.job import InputError, run
from rlhf.models import copy_causal
from rlhf.tokens import load_tokenizer


def main(job):
    """Weights that come only in torch's format are read as tensors alone, never unpickled."""
    settings = job.settings
    folder, _, commit = fetch(settings.hub, "model", settings.revision, choose)
    job.facts |= {"commit": commit, "licence": licence_of(folder)}
    try:
        load_tokenizer(folder).save_pretrained(job.result)
        copy_causal(folder, job.result)
    # The files are somebody else's, and each reader of one has errors of its own.
    except Exception as error:
        reason = f"{error}".strip().partition("\n")[0] or type(error).__name__
        raise InputError(f"hub model {settings.hub} at {commit}: {reason}") from None


def choose(paths):
    """Config, tokenizer, card, and weights: in torch's format only where there are no others."""

    def matching(*patterns):
        top = [path for path in paths if "/" not in path]
        return [path for path in top if any(fnmatchcase(path, pattern) for pattern in patterns)]

    weights = matching("*.safetensors") or matching("pytorch_model*.bin")
    return weights + matching("*.json", "*.txt", "*.model", "*.jinja", CARD)


if __name__ == "__main__":
    run(main)
