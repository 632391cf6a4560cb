"""Files of the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import snapshot_download

# Of the HTTP library that huggingface_hub has under it.
from huggingface_hub.errors import HTTPError

from rlhf.job import InputError


def fetch(repository, kind, revision, patterns):
    """Folder with the files of a "model" or "dataset" repository, and the full commit id.

    patterns: globs; each file that one of them matches is in the folder, perhaps with others.
    Endpoint, offline mode, cache and token are huggingface_hub's own (HF_ENDPOINT, HF_HUB_OFFLINE,
    HF_HOME, HF_TOKEN). Raises InputError where the hub says no or cannot be reached, or a download
    breaks off.
    """
    # To huggingface_hub a * also stands for slashes, and **/ for one folder at least.
    allowed = [pattern.replace("**/", "*") for pattern in patterns]
    try:
        folder = snapshot_download(
            repository, repo_type=kind, revision=revision, allow_patterns=allowed
        )
    # ValueError: an answer that is no JSON, a name that is none; RuntimeError: Xet downloads.
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        # All lines of the message: the first one often is a bare "404 Client Error."
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"hub {kind} {repository} at {revision}: {reason}") from None
    return Path(folder), Path(folder).name
