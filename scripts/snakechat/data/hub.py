"""Files of the Hugging Face hub, over connections that break."""

import hashlib
import re
import sys
import time
from contextlib import contextmanager
from pathlib import Path

# The HTTP library that huggingface_hub has under it.
import httpx2
from huggingface_hub import (
    HfApi,
    constants,
    hf_hub_download,
    hf_hub_url,
    metadata_load,
    snapshot_download,
    utils,
)
from yaml import YAMLError

from snakechat.data.model_files import CARD
from snakechat.workflow.digests import write_atomically
from snakechat.workflow.errors import InputError

# Seconds without a byte after which a connection is broken.
TIMEOUT = 30
# Attempts in vain, each wait twice as long as the one before: two minutes in all.
ATTEMPTS, FIRST_WAIT = 10, 0.25


def fetch(repository, kind, revision, choose):
    """Folder with files of a "model" or "dataset" repository, their paths in it, full commit id.

    choose: function of all paths of the repository, sorted; it returns those to fetch. Offline it
    sees what the cache has of the revision. Endpoint, offline mode, cache and token are
    huggingface_hub's own (HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME, HF_TOKEN).

    Raises InputError where the hub says no, stays out of reach or sends damaged files, where the
    cache cannot be written or, offline, has nothing; and what choose raises.
    """
    about = f"hub {kind} {repository} at {revision}"
    repo = {"repo_id": repository, "repo_type": kind}
    if constants.HF_HUB_OFFLINE:
        with told(about):
            # allow_patterns: of the files that the cache may know to be missing, none matters here.
            folder = Path(snapshot_download(**repo, revision=revision, allow_patterns=[]))
        files = [path for path in folder.rglob("*") if path.is_file()]
        paths = choose(sorted(path.relative_to(folder).as_posix() for path in files))
        return folder, paths, folder.name
    with told(about):
        ask = {"revision": revision, "files_metadata": True, "timeout": TIMEOUT}
        info = patiently(lambda: HfApi().repo_info(**repo, **ask))
        files = {file.rfilename: file for file in info.siblings}
    paths = choose(sorted(files))
    cache = Path(constants.HF_HUB_CACHE, "--".join([f"{kind}s", *repository.split("/")]))
    with told(about):
        for path in paths:
            fetch_file({**repo, "revision": info.sha, "filename": path}, files[path], cache)
        # What the cache holds for the revision, for offline runs: only now is it all there.
        ref = cache / "refs" / revision
        if revision != info.sha and not (ref.exists() and ref.read_text() == info.sha):
            write_atomically(ref, info.sha)
    return cache / "snapshots" / info.sha, paths, info.sha


def licence_of(folder):
    """The licence that a repository's card in a folder names; None where it names none.

    A word: what a stranger wrote is going to stand in cards of ours.
    """
    try:
        licence = (metadata_load(folder / CARD) or {}).get("license", "")
    except (FileNotFoundError, ValueError, YAMLError):
        return None
    return licence if re.fullmatch(r"[\w.+-]+", str(licence)) else None


@contextmanager
def told(about):
    """Errors of the hub, the network and the cache become an InputError of one line."""
    try:
        yield
    # ValueError: a response that is no JSON, a name that is none; RuntimeError: Xet downloads.
    except (httpx2.HTTPError, OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{about}: {reason_of(error)}") from None


def reason_of(error):
    """All lines of a message in one: the first one often is a bare "404 Client Error."."""
    return " ".join(str(error).split()) or type(error).__name__


def fetch_file(file, listed, cache):
    """Bring a file into the cache unless it is there. Raises ValueError if it arrives damaged."""
    name, size = file["filename"], listed.size
    # Large files (LFS) are named by their sha256, small ones as git names them.
    digest = listed.lfs.sha256 if listed.lfs else listed.blob_id
    if size is None or not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", digest or ""):
        raise ValueError(f"{name} is listed without its size and digest")
    path = cache / "snapshots" / file["revision"] / name
    for _ in range(2):
        # What is larger goes through Xet alone.
        if not path.exists() and size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            load(hf_hub_url(**file), cache / "blobs" / digest, size)
        # Finds the blob and links it.
        patiently(lambda: hf_hub_download(**file))
        found_size = path.stat().st_size
        begun = hashlib.sha256() if listed.lfs else hashlib.sha1(b"blob %d\0" % found_size)
        with path.open("rb") as data:
            found = hashlib.file_digest(data, lambda begun=begun: begun).hexdigest()
        if (found_size, found) == (size, digest):
            return
        path.resolve().unlink()
        path.unlink(missing_ok=True)
    raise ValueError(
        f"{name} is damaged: expected {size} bytes with digest {digest},"
        f" found {found_size} bytes with digest {found}"
    )


def load(url, blob, size):
    """Load a blob of the cache, from where the last attempt of any process broke off.

    hf_hub_download would not: of a download that fails or is killed it keeps nothing, and it loses
    up to 10 MB with each connection.
    """
    cache, part = blob.parent.parent, blob.with_name(f"{blob.name}.incomplete")
    # The lock that hf_hub_download takes.
    lock = cache.parent / ".locks" / cache.name / f"{blob.name}.lock"
    for folder in (lock.parent, blob.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with utils.WeakFileLock(lock):
        if not blob.exists():
            part.touch()
            patiently(lambda: go_on(url, part, size), lambda: part.stat().st_size)
            part.replace(blob)


def go_on(url, part, size):
    """Ask once for all that a file still lacks."""
    with part.open("ab") as file:
        if (had := file.tell()) >= size:
            return
        # Compressed, a file would have other sizes and ranges.
        headers = {**utils.build_hf_headers(), "Accept-Encoding": "identity"}
        if had:
            headers["Range"] = f"bytes={had}-"
        with utils.get_session().stream("GET", url, headers=headers) as response:
            utils.hf_raise_for_status(response)
            # A server that knows no ranges sends the whole file.
            if response.status_code != 206:
                had = file.truncate(0)
            bar = {"total": size, "initial": had, "unit": "B", "unit_scale": True}
            with utils.tqdm(desc=url.rpartition("/")[2], **bar, disable=None) as progress:
                for chunk in response.iter_bytes():
                    file.write(chunk)
                    progress.update(len(chunk))


def patiently(step, got=lambda: 0):
    """What step() returns. After failures that may pass it is called again.

    It gives up after ATTEMPTS in a row with got() no higher: a large file may need any number of
    them, as long as each brings a part.
    """
    vain, most = 0, got()
    while True:
        # For those requests of huggingface_hub that would wait forever.
        utils.get_session().timeout = TIMEOUT
        try:
            return step()
        except (httpx2.HTTPError, OSError) as failure:
            # Where huggingface_hub cannot ask for a file it says that the cache has none.
            hidden = isinstance(failure, utils.LocalEntryNotFoundError) and failure.__cause__
            error = hidden or failure
        if got() > most:
            vain, most = 0, got()
        vain += 1
        if vain == ATTEMPTS or not may_pass(error):
            raise error
        wait = FIRST_WAIT * 2 ** (vain - 1)
        if isinstance(error, utils.HfHubHTTPError):
            limit = utils.parse_ratelimit_headers(error.response.headers)
            wait = max(wait, limit.reset_in_seconds if limit and not limit.remaining else 0)
        print(f"{reason_of(error)}; again in {wait:g} s", file=sys.stderr)
        time.sleep(wait)


def may_pass(error):
    """Whether the network or the hub failed, not the request."""
    if isinstance(error, utils.HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    passing = (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.TimeoutException)
    return isinstance(error, passing)
