"""Fetch a base model or reward model, and its tokenizer: from the hub or a folder.

The result has safetensors.
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from snakechat.data.cards import card_facts
from snakechat.data.hub import fetch
from snakechat.data.model_files import check_files, model_files
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.copying import copy_model
from snakechat.workflow.digests import unchanged_files
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job, run


def main(job: Job) -> None:
    """Fetch the model. The weights are copied without loading them.

    Those in PyTorch's format are read as tensors only, never unpickled as other objects.
    """
    if hasattr(job.settings, "hub"):
        hub, revision = job.settings.hub, job.settings.revision
        folder, names, commit = fetch(hub, "model", revision, lambda found, _: model_files(found))
        job.facts["commit"] = commit
        paths = [folder / name for name in names]
        with unchanged_files(paths):
            save(job, paths, card_facts(folder), f"hub model {hub} at {commit}")
        return
    source = job.options.source
    paths = [Path(source, name) for name in job.spec["files"]]
    save(job, paths, job.settings.card, f"model in {source}")


def save(job: Job, paths: Iterable[Path], card: dict[str, Any], source: str) -> None:
    """Save the model of some files as the result.

    Args:
        card: What its card declares.
        source: Description of the model for errors.
    """
    job.facts |= card
    try:
        with tempfile.TemporaryDirectory() as links:
            # A folder with only these files: the libraries would read other ones, too.
            folder = Path(links)
            for path in paths:
                (folder / path.name).symlink_to(path.resolve())
            check_files(folder)
            arguments = getattr(job.settings, "template_arguments", {})
            load_tokenizer(folder, arguments).save_pretrained(job.result)
            copy_model(folder, job.result)
    # The libraries raise exceptions of many classes for invalid files.
    except Exception as error:
        reason = f"{error}".strip().partition("\n")[0] or type(error).__name__
        raise InputError(f"{source}: {reason}") from None


if __name__ == "__main__":
    run(main)
