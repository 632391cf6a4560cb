"""Digests of JSON values and files, external files, and atomic writes of small text files.

Standard library only: the workflow imports this module while it plans.
"""

import errno
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from snakechat.workflow.errors import InputError, ProgressLines

AnyPath = TypeVar("AnyPath", bound=str | Path)

# The key with the digest of a JSON object, which the object does not have itself.
SEAL = "sha256"
CHUNK_BYTES = 1 << 20
# Seconds after the last change of a file in which another change may leave its times as they are:
# FAT has the coarsest times, 2 s. One more for the clock of a file server.
RECENT = 3.0
# Reading from more disks or servers at once than this rarely helps.
MAX_THREADS = 8
# Seconds before the first line of progress.
FIRST_PROGRESS = 2.0

# What planning remembers; it can be deleted at any time. Planning writes nowhere else.
MEMORY = Path(".snakemake/snakechat")

# Size, modification and change time in ns, and inode of a file: an edit changes at least one of
# them, unless it follows another one within RECENT. ctime is among them because an edit can restore
# mtime but not ctime.
Identity = list[int]


def canonical_json(value: Any) -> str:
    """Return one JSON text per value: sorted keys, no blanks.

    Raises:
        ValueError: The value contains NaN or infinity.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """Return the sha256 (hex) of a JSON value; 1 and 1.0 differ, as they do for a program."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sealed_json(value: Mapping[str, Any]) -> str:
    """Return the text of a JSON object with its own digest, by which read_sealed notices damage."""
    return json.dumps({**value, SEAL: digest(value)}, indent=1, sort_keys=True) + "\n"


def read_sealed(path: str | Path) -> dict[str, Any] | None:
    """Return the object that sealed_json wrote into a file; None if it is missing or damaged."""
    try:
        value = json.loads(Path(path).read_text())
        return value if isinstance(value, dict) and value.pop(SEAL, "") == digest(value) else None
    except (OSError, ValueError, RecursionError):
        return None


# --- files ------------------------------------------------------------------------------------


def file_digest(path: str | Path, is_cancelled: Callable[[], bool] = lambda: False) -> str:
    """Return the sha256 (hex) of the bytes of a file.

    Raises:
        CancelledError: is_cancelled returned true while the file was read.
        OSError: The file cannot be read.
    """
    sha = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            if is_cancelled():
                raise CancelledError
            sha.update(chunk)
    return sha.hexdigest()


def file_digests(paths: Iterable[AnyPath]) -> dict[AnyPath, str]:
    """Return the sha256 (hex) of many files, in the order of the paths.

    Several threads read them, because hashlib releases the interpreter's lock. Lines of progress
    appear on standard error if it takes longer than two seconds.

    Raises:
        OSError: A file cannot be read.
    """
    order = list(dict.fromkeys(paths))
    if len(order) == 1 and os.stat(order[0]).st_size <= CHUNK_BYTES:
        # A thread would cost more.
        return {order[0]: file_digest(order[0])}
    progress = ProgressLines("reading", "files", len(order), next_line=FIRST_PROGRESS)
    cancelled = threading.Event()
    pool = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))
    tasks = {path: pool.submit(file_digest, path, cancelled.is_set) for path in order}
    digests: dict[AnyPath, str] = {}
    try:
        for path, task in tasks.items():
            while not wait([task], timeout=1).done:
                progress.update(len(digests))
            digests[path] = task.result()
            progress.update(len(digests))
        return digests
    finally:
        # Neither an error nor Ctrl+C waits for a file of many gigabytes.
        cancelled.set()
        pool.shutdown(cancel_futures=True)


def file_identity(path: str | Path) -> Identity:
    """Return what an edit or a replacement of a file changes: see Identity.

    Raises:
        OSError: The file does not exist or cannot be examined.
    """
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


class DigestCache:
    """Cached digests of files: a file is read only if its identity changed.

    Whatever is wrong with the file of the cache costs time only.
    """

    def __init__(self, path: str | Path) -> None:
        # The working directory may be another one later.
        self.path = Path(path).absolute()
        # Identity and digest by real path.
        self.entries = self._read()

    def digests(self, paths: Iterable[AnyPath]) -> dict[AnyPath, str]:
        """Return the digests of files, in the order of the paths; several threads read them.

        Raises:
            OSError: A file cannot be read.
        """
        order, found = dict.fromkeys(paths), dict[AnyPath, str]()
        changed: dict[AnyPath, tuple[str, Identity]] = {}
        now = time.time()
        for path in order:
            real = os.path.realpath(str(path))
            identity = file_identity(real)
            entry = self.entries.get(real)
            if isinstance(entry, list) and entry[:-1] == identity:
                found[path] = entry[-1]
            else:
                changed[path] = real, identity
        if changed:
            found |= file_digests(changed)
            # An edit after or during the digest must not be hidden by equal times. As git does for
            # its index ("racy git"): on a file system with coarse times, a second edit within the
            # same tick changes no time. Files with a time in the future are omitted, too.
            latest = (now - RECENT) * 1e9
            self._add(
                {
                    real: [*before, found[path]]
                    for path, (real, before) in changed.items()
                    if max(before[1:3]) <= latest
                }
            )
        return {path: found[path] for path in order}

    def _add(self, entries: dict[str, list[Any]]) -> None:
        """Add entries, and write the file of the cache; an error costs time only."""
        if entries:
            # With those that another process wrote in the meantime.
            self.entries = {**self.entries, **self._read(), **entries}
            with suppress(OSError):
                write_atomically(self.path, canonical_json(self.entries), durable=False)

    def _read(self) -> dict[str, list[Any]]:
        """Return the entries in the file of the cache."""
        try:
            entries = json.loads(self.path.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return entries if isinstance(entries, dict) else {}


# --- writing ----------------------------------------------------------------------------------


def write_atomically(path: str | Path, text: str, durable: bool = True) -> None:
    """Write a small text file; a concurrent reader gets the old or the new text, never a mix.

    Args:
        path: The file; missing parent folders are created.
        text: The content.
        durable: Whether a power cut after this call must not lose the text, nor a power cut during
            it leave an empty file. It costs some milliseconds (4 ms on the disk of a laptop), which
            a thousand spec files need not spend: their names contain their digests, so that a
            damaged one is noticed and rewritten.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        fsync(path.parent)


def fsync(path: str | Path) -> None:
    """Store a file, or the names in a folder, on disk: a rename in it then survives a power cut.

    Raises:
        OSError: The disk failed. File systems that cannot do this (some network file systems) raise
            nothing.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


# --- external files -------------------------------------------------------------------------------


@contextmanager
def planned_files(planned: Mapping[Path, str]) -> Iterator[None]:
    """Check that files have the planned content until the end of the context, which reads them.

    A file that was replaced and put back has its digest again, although the other one may have been
    read. Its times differ, so that they decide; a file that was only touched is an error too.

    planned: The sha256 of each file.

    Raises:
        InputError: A file has another content, or was edited or replaced before the end.
    """
    before = {path: file_identity(path) for path in planned if path.is_file()}
    found = file_digests(before)
    for path, digest in planned.items():
        if found.get(path) != digest:
            raise InputError(f"{path} changed since this build was planned: start it again")
    yield
    for path, identity in before.items():
        if not path.exists() or file_identity(path) != identity:
            raise InputError(f"{path} changed while it was read: start the build again")
