"""Fetch a base model and its tokenizer from the hub or a local folder, as safetensors."""

import tempfile
from pathlib import Path

from snakechat.data.hub import fetch, licence_of
from snakechat.data.model_files import model_files
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.models import copy_causal
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import run
from snakechat.workflow.manifest import check_external_file


def main(job):
    """Weights that come only in torch's format are read as tensors alone, never unpickled."""
    if hasattr(job.settings, "hub"):
        hub, revision = job.settings.hub, job.settings.revision
        folder, _, commit = fetch(hub, "model", revision, model_files)
        job.facts["commit"] = commit
        copy(job, folder, f"hub model {hub} at {commit}")
        return
    source = Path(job.placement["source"])
    with tempfile.TemporaryDirectory() as folder:
        # By themselves: what else lies beside them was not planned, and must not be read.
        for name, planned in job.spec["files"].items():
            check_external_file(source / name, planned)
            Path(folder, name).symlink_to((source / name).resolve())
        copy(job, Path(folder), f"model in {source}")


def copy(job, folder, about):
    """The model of a folder as a result. about: what an error calls it."""
    job.facts["licence"] = licence_of(folder)
    try:
        load_tokenizer(folder).save_pretrained(job.result)
        copy_causal(folder, job.result)
    # The files are somebody else's, and each reader of one has errors of its own.
    except Exception as error:
        reason = f"{error}".strip().partition("\n")[0] or type(error).__name__
        raise InputError(f"{about}: {reason}") from None


if __name__ == "__main__":
    run(main)
