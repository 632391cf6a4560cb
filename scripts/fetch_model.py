"""Fetch a base model or reward model, and its tokenizer: from the hub or a folder.

The result has safetensors.
"""

import tempfile
from pathlib import Path

from snakechat.data.hub import card_facts, fetch
from snakechat.data.model_files import check_files, model_files
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.copying import copy_model
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job, run


def main(job: Job) -> None:
    """Fetch the model. The weights are copied without loading them.

    Those in PyTorch's format are read as tensors only, never unpickled as other objects.
    """
    if hasattr(job.settings, "hub"):
        hub, revision = job.settings.hub, job.settings.revision
        folder, names, commit = fetch(hub, "model", revision, lambda found, _: model_files(found))
        source = f"hub model {hub} at {commit}"
        job.facts |= {"commit": commit, **card_facts(folder)}
    else:
        folder, names = Path(job.options.source), list(job.spec["files"])
        source = f"model in {folder}"
        job.facts |= job.settings.card
    try:
        with tempfile.TemporaryDirectory() as links:
            # A folder with only these files: the libraries would read other ones, too.
            files = Path(links)
            for name in names:
                (files / Path(name).name).symlink_to((folder / name).resolve())
            check_files(files)
            arguments = getattr(job.settings, "template_arguments", {})
            load_tokenizer(files, arguments).save_pretrained(job.result)
            copy_model(files, job.result)
    # The libraries raise exceptions of many classes for invalid files.
    except Exception as error:
        # The first line of some names a field alone.
        reason = " ".join(" ".join(f"{error}".strip().split("\n")[:2]).split())
        reason = reason or type(error).__name__
        raise InputError(f"{source}: {reason}") from None


if __name__ == "__main__":
    run(main)
