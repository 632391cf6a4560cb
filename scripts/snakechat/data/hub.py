"""Files of the Hugging Face hub.

huggingface_hub downloads, resumes broken connections, caches and locks. This module adds what the
library lacks, as tests/unit/data/test_hub.py shows: every file is verified against its digest on
the hub, and all requests are retried while the hub is unavailable.
"""

import hashlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

# The HTTP library of huggingface_hub.
import httpx2
from huggingface_hub import HfApi, constants, hf_hub_download, metadata_load, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.hf_api import RepoSibling
from yaml import YAMLError

from snakechat.data.model_files import CARD
from snakechat.workflow.digests import write_atomically
from snakechat.workflow.errors import InputError

T = TypeVar("T")
RepositoryKind = Literal["model", "dataset"]

# Seconds after which a request for the list of files fails.
TIMEOUT = 30
# Seconds between retries while the hub is unavailable: two minutes in total.
RETRY_WAITS = (1, 2, 4, 8, 16, 32, 64)


def fetch(
    repository: str,
    kind: RepositoryKind,
    revision: str,
    choose: Callable[[list[str]], list[str]],
) -> tuple[Path, list[str], str]:
    """Download files of a repository into huggingface_hub's cache.

    HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME and HF_TOKEN work as documented by huggingface_hub.

    Args:
        repository: OWNER/NAME on the hub.
        kind: Type of the repository.
        revision: Branch, tag or commit.
        choose: Selects the paths to download from the sorted paths of the repository; offline, from
            the paths of the revision in the cache.

    Returns:
        Folder of the files, the selected paths relative to it, and the full commit id.

    Raises:
        InputError: The hub rejects the request, is unavailable or sends damaged files; the cache
            cannot be written; or, offline, the revision is not in the cache. Errors of choose
            propagate.
    """
    source = f"hub {kind} {repository} at {revision}"
    if constants.HF_HUB_OFFLINE:
        with hub_errors(source):
            # No patterns: the folder alone. A revision is listed here once it is complete.
            folder = Path(
                snapshot_download(repository, repo_type=kind, revision=revision, allow_patterns=[])
            )
        cached = [path for path in folder.rglob("*") if path.is_file()]
        paths = choose(sorted(path.relative_to(folder).as_posix() for path in cached))
        return folder, paths, folder.name
    with hub_errors(source):
        list_files = HfApi().model_info if kind == "model" else HfApi().dataset_info
        info = retry(
            lambda: list_files(repository, revision=revision, files_metadata=True, timeout=TIMEOUT)
        )
        files = {file.rfilename: file for file in info.siblings or ()}
        commit = str(info.sha)
    paths = choose(sorted(files))
    cache = Path(constants.HF_HUB_CACHE, "--".join([f"{kind}s", *repository.split("/")]))
    with hub_errors(source):
        for path in paths:
            fetch_file(repository, kind, commit, files[path])
        # The commit of the revision, for offline runs. Written last: the revision is complete now.
        ref = cache / "refs" / revision
        if revision != commit and not (ref.exists() and ref.read_text() == commit):
            write_atomically(ref, commit)
    return cache / "snapshots" / commit, paths, commit


def licence_of(folder: Path) -> str | None:
    """Return the licence that the card of a repository names, or None.

    Only a single word is returned, because the text appears in generated pages.
    """
    try:
        licence = (metadata_load(folder / CARD) or {}).get("license", "")
    except (FileNotFoundError, ValueError, YAMLError):
        return None
    return licence if re.fullmatch(r"[\w.+-]+", str(licence)) else None


@contextmanager
def hub_errors(source: str) -> Iterator[None]:
    """Turn errors of the hub, the network and the cache into an InputError of one line.

    source: The repository and revision, for the message.
    """
    try:
        yield
    # ValueError: an invalid repository name or a reply that is not JSON. RuntimeError: Xet.
    except (httpx2.HTTPError, OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{source}: {one_line(error)}") from None


def one_line(error: BaseException) -> str:
    """Return all lines of a message as one: the first is often only "404 Client Error."."""
    return " ".join(str(error).split()) or type(error).__name__


def fetch_file(repository: str, kind: RepositoryKind, commit: str, listed: RepoSibling) -> None:
    """Download a file into the cache and verify it; download it again if it is damaged.

    listed: The file in the list of the repository, with its size and digest.

    Raises:
        ValueError: The file has no digest on the hub, or arrived damaged twice.
    """
    name, size = listed.rfilename, listed.size
    # Large files (LFS) are identified by their SHA-256, small ones by their git blob id.
    digest = listed.lfs.sha256 if listed.lfs else listed.blob_id
    if size is None or not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", digest or ""):
        raise ValueError(f"{name}: the hub lists neither its size nor its digest")
    for force_download in (False, True):

        def download(force_download: bool = force_download) -> str:
            return hf_hub_download(
                repository,
                name,
                repo_type=kind,
                revision=commit,
                force_download=force_download,
            )

        path = Path(retry(download))
        found_size, found_digest = path.stat().st_size, content_digest(path, bool(listed.lfs))
        if (found_size, found_digest) == (size, digest):
            return
    path.resolve().unlink()
    path.unlink(missing_ok=True)
    raise ValueError(
        f"{name} is damaged: expected {size} bytes with digest {digest},"
        f" found {found_size} bytes with digest {found_digest}"
    )


def content_digest(path: Path, is_lfs: bool) -> str:
    """Return the digest of a file as the hub lists it: SHA-256 (LFS) or git blob id."""
    digest = hashlib.sha256() if is_lfs else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: digest).hexdigest()


def retry(request: Callable[[], T]) -> T:
    """Return request(), called again after each wait while the hub or the network is unavailable.

    hf_hub_download retries broken transfers by itself, but neither server errors nor an outage that
    lasts longer than some seconds.
    """
    waits = iter(RETRY_WAITS)
    while True:
        try:
            return request()
        except (httpx2.HTTPError, OSError) as error:
            # LocalEntryNotFoundError hides the failed request that made the library use its cache.
            hidden = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
            cause = hidden or error
            wait = next(waits, None)
            if wait is None or not is_transient(cause):
                raise cause from None
        print(f"{one_line(cause)}: next attempt in {wait} s", file=sys.stderr)
        time.sleep(wait)


def is_transient(error: BaseException) -> bool:
    """Return whether the network or the hub failed, so that the same request may succeed later."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    transient = (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.TimeoutException)
    return isinstance(error, transient)
