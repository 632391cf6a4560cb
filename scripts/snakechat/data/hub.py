"""Files of the Hugging Face hub.

huggingface_hub downloads, resumes broken connections, caches and locks. This module adds what the
library lacks, as tests/unit/data/test_hub.py shows: every file is verified against its digest on
the hub, offline too, and errors are one line.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

# The HTTP library of huggingface_hub.
import httpx2
from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from snakechat.workflow.digests import write_atomically
from snakechat.workflow.errors import InputError

# Seconds after which a request for the list of files fails.
TIMEOUT = 30
UNREACHABLE = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError)
UNKNOWN = "check the name, and set HF_TOKEN if it is private or gated"
WITHOUT_NETWORK = (
    "the Hub is unreachable: set path to a local copy, or HF_HUB_OFFLINE=1 if its cache has the"
    " files"
)


def fetch(
    repository: str,
    kind: Literal["model", "dataset"],
    revision: str,
    choose: Callable[[list[str], Callable[[str], Path]], list[str]],
) -> tuple[Path, list[str], str]:
    """Download files of a repository into huggingface_hub's cache.

    HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME and HF_TOKEN work as documented by huggingface_hub.

    Args:
        repository: OWNER/NAME on the hub.
        kind: Type of the repository.
        revision: Branch, tag or commit.
        choose: Selects the paths to download from the sorted paths of the repository; offline, from
            those in the cache. Its second argument downloads a file.

    Returns:
        Folder of the files, the selected paths relative to it, and the full commit id.

    Raises:
        InputError: The hub rejects the request or is unavailable; the cache cannot be written; or a
            file of the cache is damaged. A damaged file is deleted unless HF_HUB_OFFLINE is set.
            Errors of choose propagate.
    """
    # The hub's digest of each file.
    listed: dict[str, str | None] = {}
    try:
        if constants.HF_HUB_OFFLINE:
            # No patterns: the folder alone.
            folder = Path(
                snapshot_download(repository, repo_type=kind, revision=revision, allow_patterns=[])
            )
            found = [path for path in folder.rglob("*") if path.is_file()]
            names = sorted(path.relative_to(folder).as_posix() for path in found)
            paths = choose(names, lambda path: folder / path)
        else:
            ask = HfApi().model_info if kind == "model" else HfApi().dataset_info
            info = ask(repository, revision=revision, files_metadata=True, timeout=TIMEOUT)
            for file in info.siblings or ():
                listed[file.rfilename] = file.lfs.sha256 if file.lfs else file.blob_id
            commit = str(info.sha)
            cache = Path(constants.HF_HUB_CACHE, "--".join([f"{kind}s", *repository.split("/")]))
            folder = cache / "snapshots" / commit

            def download(path: str) -> Path:
                return Path(hf_hub_download(repository, path, repo_type=kind, revision=commit))

            paths = choose(sorted(listed), download)
            for path in paths:
                download(path)
            # The commit of the revision, for offline runs. Written last: the revision is complete.
            ref = cache / "refs" / revision
            if revision != commit and not (ref.exists() and ref.read_text() == commit):
                write_atomically(ref, commit)
        damaged = [folder / path for path in paths if not is_whole(folder / path, listed.get(path))]
        if not constants.HF_HUB_OFFLINE:
            for path_in_cache in damaged:
                path_in_cache.resolve().unlink()
                path_in_cache.unlink(missing_ok=True)
        if damaged:
            raise ValueError(
                f"{damaged[0]} was edited or is damaged: start the build again, without"
                " HF_HUB_OFFLINE, to download it again"
            )
    # ValueError: an invalid repository name or a reply that is not JSON. RuntimeError: Xet.
    # ImportError: a SOCKS proxy.
    except (httpx2.HTTPError, OSError, ValueError, RuntimeError, ImportError) as error:
        # LocalEntryNotFoundError hides the failed request that made the library use its cache.
        is_hidden = isinstance(error, LocalEntryNotFoundError)
        is_hidden = is_hidden and isinstance(error.__cause__, httpx2.HTTPError)
        cause = error.__cause__ if is_hidden else error
        # The first line is often only "404 Client Error.".
        reason = " ".join(str(cause).split()) or type(cause).__name__
        hint = f": {WITHOUT_NETWORK}" if isinstance(cause, UNREACHABLE) else ""
        if isinstance(cause, RepositoryNotFoundError):
            reason, hint = reason.partition(". Please make sure")[0], f": {UNKNOWN}"
        source = f"hub {kind} {repository} at {revision}"
        raise InputError(f"{source}: {reason}{hint}") from None
    return folder, paths, folder.name


def is_whole(path: Path, digest: str | None) -> bool:
    """Return whether a file of the cache has the digest that the hub lists.

    digest: SHA-256 of a large file, or the git blob id of a small one; None for that in its name:
        the cache has links to files that are named by their digests.
    """
    if digest is None:
        digest = path.readlink().name if path.is_symlink() else ""
    is_large = len(digest) == hashlib.sha256().digest_size * 2
    found = hashlib.sha256() if is_large else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: found).hexdigest() == digest
