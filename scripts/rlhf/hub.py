"""Files of the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from rlhf.job import InputError


def fetch(repository, kind, revision, patterns):
    """Folder with the files of a "model" or "dataset" repository, and the full commit id.

    Endpoint, offline mode, cache and token are huggingface_hub's own (HF_ENDPOINT, HF_HUB_OFFLINE,
    HF_HOME, HF_TOKEN). Raises InputError where the hub says no or cannot be reached.
    """
    try:
        folder = snapshot_download(
            repository, repo_type=kind, revision=revision, allow_patterns=patterns
        )
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"hub {kind} {repository} at {revision}: {reason}") from None
    return Path(folder), Path(folder).name
