"""Fetch a base model and its tokenizer from the hub, as safetensors."""

from rlhf.hub import fetch
from rlhf.job import run
from rlhf.models import copy_causal
from rlhf.tokens import load_tokenizer


def main(job):
    """Weights that come only in torch's format are read as tensors alone, never unpickled."""
    settings = job.settings
    patterns = ["*.json", "*.txt", "*.model", "*.safetensors"]
    folder, commit = fetch(settings.hub, "model", settings.revision, patterns)
    if not list(folder.glob("*.safetensors")):
        folder, commit = fetch(settings.hub, "model", commit, [*patterns, "pytorch_model*.bin"])
    load_tokenizer(folder).save_pretrained(job.result)
    copy_causal(folder, job.result)
    (job.result / "source.txt").write_text(f"{settings.hub} {commit}\n")


if __name__ == "__main__":
    run(main)
