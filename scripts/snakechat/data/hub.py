"""Files of the Hugging Face hub.

huggingface_hub downloads, resumes broken connections, caches and locks. This module adds what the
library lacks, as tests/unit/data/test_hub.py shows: every file is verified against its digest on
the hub, offline too, and all requests are retried while the hub is unavailable.
"""

import functools
import hashlib
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

# The HTTP library of huggingface_hub.
import httpx2
from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.hf_api import DatasetInfo, ModelInfo, RepoSibling

from snakechat.workflow.digests import write_atomically
from snakechat.workflow.errors import InputError
from snakechat.workflow.printable import printable_line

T = TypeVar("T")
RepositoryKind = Literal["model", "dataset"]
# Size, and SHA-256 (large files) or git blob id.
ExpectedFile = tuple[int, str]

COMMIT = re.compile("[0-9a-f]{40}")
DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
SHA256_LENGTH = 64
# What helps against an incomplete or edited cache.
ONLINE_ONCE = "run once without HF_HUB_OFFLINE to download it"

# Seconds after which a request for the list of files fails.
TIMEOUT = 30
# Seconds between retries while the hub is unavailable: two minutes in total.
RETRY_WAITS = (1, 2, 4, 8, 16, 32, 64)
# The same before the hub has answered once: a machine without a network should not wait.
FIRST_WAITS = (1,)
UNREACHABLE = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError)
WITHOUT_NETWORK = (
    "the Hub is unreachable: set path to a local copy, or HF_HUB_OFFLINE=1 if its cache has the"
    " files"
)


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
        choose: Selects the paths to download from the sorted paths of the repository. Offline, they
            are those that the hub listed when this function filled the cache; in a cache that
            another program filled, the paths of the revision there.

    Returns:
        Folder of the files, the selected paths relative to it, and the full commit id.

    Raises:
        InputError: The hub rejects the request, is unavailable or sends damaged files; the cache
            cannot be written; or, offline, the revision is not in the cache or one of its files was
            edited. Errors of choose propagate.
    """
    source = f"hub {kind} {repository} at {revision}"
    cache = Path(constants.HF_HUB_CACHE, "--".join([f"{kind}s", *repository.split("/")]))
    if constants.HF_HUB_OFFLINE:
        with hub_errors(source):
            # No patterns: the folder alone.
            folder = Path(
                snapshot_download(repository, repo_type=kind, revision=revision, allow_patterns=[])
            )
        listed = read_list(list_path(cache, folder.name))
        cached = [path for path in folder.rglob("*") if path.is_file()]
        names = listed or {path.relative_to(folder).as_posix() for path in cached}
        paths = choose(sorted(names))
        with hub_errors(source):
            for path in paths:
                verify_cached(folder / path, path, (listed or {}).get(path))
        return folder, paths, folder.name
    with hub_errors(source):
        info = repository_info(repository, kind, revision, files=True)
        commit = str(info.sha)
        files = {file.rfilename: expected_file(file) for file in info.siblings or ()}
        keep_list(list_path(cache, commit), files)
    paths = choose(sorted(files))
    with hub_errors(source):
        for path in paths:
            fetch_file(repository, kind, commit, path, files[path])
        # The commit of the revision, for offline runs. Written last: the revision is complete now.
        ref = cache / "refs" / revision
        if revision != commit and not (ref.exists() and ref.read_text() == commit):
            write_atomically(ref, commit)
    return cache / "snapshots" / commit, paths, commit


def current_commit(repository: str, kind: RepositoryKind, revision: str) -> str:
    """Return the full commit that a branch or a tag names on the hub now.

    Raises:
        InputError: The hub rejects the request or is unavailable.
    """
    with hub_errors(f"hub {kind} {repository} at {revision}"):
        return str(repository_info(repository, kind, revision, files=False).sha)


def moved_branches(
    results: Iterable[tuple[Mapping[str, Any], Mapping[str, Any] | None]],
) -> list[str]:
    """Describe the branches and tags that have moved since their results were made.

    Args:
        results: Today's spec of each job, and the facts of its result or None. Those that do not
            come from the hub, that name a full commit or that have no result are skipped.

    Returns:
        A sentence per result whose revision names another commit now.

    Raises:
        InputError: The hub rejects a request or is unavailable.
    """
    ask = functools.cache(current_commit)
    lines = []
    for spec, facts in results:
        settings, made_from = spec["settings"], (facts or {}).get("commit")
        revision = settings.get("revision")
        if "hub" not in settings or made_from is None or COMMIT.fullmatch(revision):
            continue
        kind: RepositoryKind = "model" if spec["rule"] == "fetch_model" else "dataset"
        current = ask(settings["hub"], kind, revision)
        if current != made_from:
            lines.append(
                f"{kind} {spec['name']}: {revision} of {settings['hub']} was {made_from} and is"
                f" {current} now: set revision to the first to keep the result, to the second to"
                " replace it"
            )
    return lines


def repository_info(
    repository: str, kind: RepositoryKind, revision: str, files: bool
) -> ModelInfo | DatasetInfo:
    """Ask the hub for the commit of a revision, and for the sizes and digests of its files."""
    ask = HfApi().model_info if kind == "model" else HfApi().dataset_info
    return retry(
        lambda: ask(repository, revision=revision, files_metadata=files, timeout=TIMEOUT),
        unreachable_waits=FIRST_WAITS,
    )


@contextmanager
def hub_errors(source: str) -> Iterator[None]:
    """Turn errors of the hub, the network and the cache into an InputError of one line.

    source: The repository and revision, for the message.
    """
    try:
        yield
    # ValueError: an invalid repository name or a reply that is not JSON. RuntimeError: Xet.
    # ImportError: a SOCKS proxy.
    except (httpx2.HTTPError, OSError, ValueError, RuntimeError, ImportError) as error:
        hint = ""
        if isinstance(error, UNREACHABLE):
            hint = f": {WITHOUT_NETWORK}"
        elif isinstance(error, httpx2.UnsupportedProtocol):
            hint = f": set HF_ENDPOINT to a URL with https://, it is {constants.ENDPOINT}"
        elif isinstance(error, ImportError):
            hint = ": run pip install socksio, or set HTTPS_PROXY and ALL_PROXY to an HTTP proxy"
        raise InputError(f"{source}: {one_line(error)}{hint}") from None


def one_line(error: BaseException) -> str:
    """Return all lines of a message as one: the first is often only "404 Client Error."."""
    return " ".join(str(error).split()) or type(error).__name__


def expected_file(listed: RepoSibling) -> ExpectedFile | None:
    """Return size and digest of a file in the list of a repository, or None if it lacks them."""
    # Large files (LFS) are identified by their SHA-256, small ones by their git blob id.
    digest = listed.lfs.sha256 if listed.lfs else listed.blob_id
    if listed.size is None or not DIGEST.fullmatch(digest or ""):
        return None
    return listed.size, str(digest)


def list_path(cache: Path, commit: str) -> Path:
    """Return where the hub's list of the files of a commit is kept, for offline runs."""
    return cache / "snakechat" / f"{commit}.json"


def keep_list(path: Path, files: Mapping[str, ExpectedFile | None]) -> None:
    """Write the hub's list of the files of a commit into the cache, unless it is read-only."""
    if read_list(path) != files:
        with suppress(OSError):
            write_atomically(path, json.dumps(files, sort_keys=True))


def read_list(path: Path) -> dict[str, ExpectedFile | None] | None:
    """Return the kept list of a commit's files, or None if there is none or it is damaged."""
    try:
        return {
            name: (int(expected[0]), str(expected[1])) if expected else None
            for name, expected in json.loads(path.read_text()).items()
        }
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        return None


def verify_cached(path: Path, name: str, expected: ExpectedFile | None) -> None:
    """Check a file of the cache without the hub.

    Args:
        path: The file, in the folder of a commit: a link to a file that is named by its digest.
        name: Path of the file in the repository.
        expected: Size and digest, if the hub's list is kept.

    Raises:
        ValueError: The file is missing, or has other bytes than the hub's file.
    """
    if not path.is_file():
        raise ValueError(f"{name} is not in the cache: {ONLINE_ONCE}")
    if expected is None:
        digest = path.resolve().name
        if not DIGEST.fullmatch(digest):
            raise ValueError(f"{path} was replaced, or copied without its link: {ONLINE_ONCE}")
        expected = path.stat().st_size, digest
    found = found_file(path, expected)
    if found != expected:
        raise ValueError(
            f"{path} was edited or is damaged: {difference(expected, found)}: {ONLINE_ONCE}"
        )


def fetch_file(
    repository: str, kind: RepositoryKind, commit: str, name: str, expected: ExpectedFile | None
) -> None:
    """Download a file into the cache and verify it; download it again if it is damaged.

    Args:
        repository, kind, commit: Where the file is.
        name: Its path.
        expected: Its size and digest.

    Raises:
        ValueError: The file has no digest on the hub, or arrived damaged twice.
    """
    if expected is None:
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
        found = found_file(path, expected)
        if found == expected:
            return
        if not path.is_symlink():
            # The library downloads the file, but leaves what stands in place of its link.
            path.unlink()
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    raise ValueError(f"{name} is damaged: {difference(expected, found)}")


def found_file(path: Path, expected: ExpectedFile) -> ExpectedFile:
    """Return the size of a file and its digest of the same kind as the expected one."""
    return path.stat().st_size, content_digest(path, is_lfs=len(expected[1]) == SHA256_LENGTH)


def difference(expected: ExpectedFile, found: ExpectedFile) -> str:
    """Describe the expected and the found size and digest of a file."""
    return "expected {} bytes with digest {}, found {} bytes with digest {}".format(
        *expected, *found
    )


def content_digest(path: Path, is_lfs: bool) -> str:
    """Return the digest of a file as the hub lists it: SHA-256 (LFS) or git blob id."""
    digest = hashlib.sha256() if is_lfs else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: digest).hexdigest()


def retry(request: Callable[[], T], unreachable_waits: tuple[int, ...] = RETRY_WAITS) -> T:
    """Return request(), called again after each wait while the hub or the network is unavailable.

    unreachable_waits: The waits, in seconds, while no connection is made at all.

    hf_hub_download retries broken transfers by itself, but neither server errors nor an outage that
    lasts longer than some seconds.
    """
    for attempt in itertools.count():
        try:
            return request()
        except (httpx2.HTTPError, OSError) as error:
            # LocalEntryNotFoundError hides the failed request that made the library use its cache.
            hidden = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
            cause = hidden or error
            waits = unreachable_waits if isinstance(cause, UNREACHABLE) else RETRY_WAITS
            if attempt >= len(waits) or not is_transient(cause):
                raise cause from None
            wait = waits[attempt]
        print(f"{printable_line(one_line(cause))}: next attempt in {wait} s", file=sys.stderr)
        time.sleep(wait)
    raise AssertionError("unreachable")


def is_transient(error: BaseException) -> bool:
    """Return whether the network or the hub failed, so that the same request may succeed later."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    transient = (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.TimeoutException)
    return isinstance(error, transient)
