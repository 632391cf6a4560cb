"""Fetch a base model and its tokenizer from the hub, as safetensors."""

from rlhf.hub import fetch
from rlhf.job import InputError, run
from rlhf.models import copy_causal
from rlhf.tokens import load_tokenizer


def main(job):
    """Weights that come only in torch's format are read as tensors alone, never unpickled."""
    settings = job.settings
    patterns = ["*.json", "*.txt", "*.model", "*.safetensors"]
    folder, commit = fetch(settings.hub, "model", settings.revision, patterns)
    if not list(folder.glob("*.safetensors")):
        folder, commit = fetch(settings.hub, "model", commit, [*patterns, "pytorch_model*.bin"])
    try:
        load_tokenizer(folder).save_pretrained(job.result)
        copy_causal(folder, job.result)
    # The files are somebody else's, and each reader of one has errors of its own.
    except Exception as error:
        reason = f"{error}".strip().partition("\n")[0] or type(error).__name__
        raise InputError(f"hub model {settings.hub} at {commit}: {reason}") from None
    (job.result / "source.txt").write_text(f"{settings.hub} {commit}\n")


if __name__ == "__main__":
    run(main)
