"""The store of results: folders that do not change once they exist.

    STORE/RULE/KEY/          the files of a result, its manifest.json, its run.json
    STORE/RULE/.KEY/lock     held by the process that makes it
    STORE/RULE/.KEY/result/  what a job makes, or made when it was killed
    STORE/RULE/.KEY/state/   checkpoints of an interrupted job
    STORE/RULE/.KEY/inputs   RULE/KEY of the results that it reads
    STORE/roots/             the output folders whose links lead to results

KEY is the digest of everything that determines the result, without names unless pages show them:
recipes, and builds that use one store, share what is equal. A result appears by one rename. Names
are links (snakechat.workflow.links).

A store is as trustworthy as everyone who can write to it: its results are used.

Standard library only: the workflow imports this module while it plans.
"""

import errno
import fcntl
import os
import platform
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from snakechat.workflow.errors import InputError, warn
from snakechat.workflow.manifest import (
    KEY_DIGITS,
    MANIFEST,
    MEMORY,
    STORE,
    UNLISTED_FILES,
    DigestCache,
    FileDigests,
    Manifest,
    file_digests,
    fsync,
    read_manifest,
    result_id,
)

ROOTS, REPLIES = "roots", "llm_replies"
KEY = re.compile(f"[0-9a-f]{{{KEY_DIGITS}}}")


class Stored(NamedTuple):
    """A complete result in a store."""

    folder: Path
    manifest: Manifest


def work_path(folder: Path, name: str = "") -> Path:
    """Return the path of what belongs to the job that makes a result, such as its `lock`."""
    return folder.with_name(f".{folder.name}") / name


def replies_folder(store: Path) -> Path:
    """Return the folder of the replies of LLM judges: in a shared store, or beside the own."""
    return (store.parent if store == STORE else store) / REPLIES


def is_writable(store: Path) -> bool:
    """Return whether results can be added to a store, which need not exist."""
    existing = next(folder for folder in (store, *store.absolute().parents) if folder.exists())
    return os.access(existing, os.W_OK | os.X_OK)


def make_folders(folder: Path) -> None:
    """Create a folder and its parents, each with the mode of its parent, whatever the umask.

    A team may share them.
    """
    for each in reversed((folder, *folder.parents)):
        if not each.is_dir():
            each.mkdir(exist_ok=True)
            with suppress(PermissionError):
                each.chmod(stat.S_IMODE(each.parent.stat().st_mode) & ~stat.S_ISVTX)


# --- locks ------------------------------------------------------------------------------------

# Not the filelock library: the workflow locks while it plans, in environments with Snakemake alone
# (--sdm conda), and filelock fails on file systems without locks, where this module warns.


class AlreadyLocked(Exception):
    """Another process holds the lock; the message names it."""


def acquire_lock(path: Path, waits: bool = False) -> int:
    """Lock a file for the lifetime of this process, and write the process's name into it.

    The system releases a flock when the process ends, however it ends, so that no lock is ever left
    behind. Programs that this process starts inherit it only after os.set_inheritable.

    Returns a file descriptor: os.close releases the lock earlier. If another process holds the
    lock, this one prints a line and waits for it, or raises AlreadyLocked.
    """
    while True:
        # The holder may delete the file and its folder at any moment: then this starts again.
        with suppress(FileNotFoundError):
            make_folders(path.parent)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # The file is empty between the moment the holder locks it and the moment it writes.
                name = os.pread(descriptor, 1000, 0).decode().strip() or "another process"
                if not waits:
                    os.close(descriptor)
                    raise AlreadyLocked(name) from None
                print(f"waiting for {name}, which makes the same result", flush=True)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                    raise
                warn(f"{path}: this file system has no locks: do not start the same build twice")
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                break
            os.close(descriptor)
    with suppress(PermissionError):
        os.fchmod(descriptor, path.parent.stat().st_mode & 0o666)
    # The name is for people: on a full disk, the file is locked without it.
    with suppress(OSError):
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
    return descriptor


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a result, and delete it at the end; raise AlreadyLocked if a job has it."""
    descriptor = acquire_lock(work_path(folder, "lock"))
    try:
        yield
        delete_lock(folder)
    finally:
        os.close(descriptor)


def delete_lock(folder: Path) -> None:
    """Delete the lock of a result, which this process holds; one that waits notices that."""
    work_path(folder, "lock").unlink(missing_ok=True)
    # There are checkpoints, or another process has created its lock already.
    with suppress(OSError):
        work_path(folder).rmdir()


# --- one result -------------------------------------------------------------------------------


def complete_result(folder: Path) -> Stored | None:
    """Return the result in a folder of the store, if its files exist and have their sizes."""
    manifest = read_manifest(folder / MANIFEST)
    if manifest is None or result_damage(folder, None, manifest):
        return None
    return Stored(folder, manifest)


def result_damage(
    folder: Path, digests: FileDigests | None = file_digests, manifest: Manifest | None = None
) -> str:
    """Return what is wrong with a result, its manifest or a file; "" if nothing is.

    Args:
        folder: The folder of the result, or a copy with any name. Results within a copy do not
            count.
        digests: Returns the digests of files. With None, only files that are missing or have
            another size are found, and no file is read.
        manifest: The manifest in the folder, if it was read.
    """
    manifest = manifest or read_manifest(folder / MANIFEST)
    if manifest is None:
        return f"{MANIFEST} cannot be read"
    files = manifest["files"]
    if KEY.fullmatch(folder.name) and not result_id(manifest).endswith(f"/{folder.name}"):
        return f"{MANIFEST} belongs to another result"
    try:
        if digests:
            paths = {path.relative_to(folder).as_posix(): path for path in walk_files(folder)}
            if links := [name for name, path in paths.items() if path.is_symlink()]:
                return f"{links[0]} is not a regular file"
            listed = {name for name, path in paths.items() if path.name not in UNLISTED_FILES}
            for name in sorted(listed ^ files.keys()):
                return f"{name} is {'missing' if name in files else 'not in the manifest'}"
        for name, properties in files.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if (folder / name).stat().st_size != properties["size"]:
                return f"{name} has another size"
        found = digests(folder / name for name in files) if digests else {}
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    for path, sha256 in found.items():
        name = path.relative_to(folder).as_posix()
        if sha256 != files[name]["sha256"]:
            return f"{name} has other content"
    return ""


def is_undamaged(folder: Path) -> bool:
    """Return whether nothing is wrong with a result; print a warning otherwise.

    A file with the identity of an earlier check is not read again: many jobs read the same models.
    """
    if damage := result_damage(folder, DigestCache(MEMORY / "results.json").digests):
        warn(f"{folder} is damaged and is made again: {damage}")
    return not damage


def publish(folder: Path) -> None:
    """Rename the unfinished folder of a result into its place in the store.

    A result that is there, damaged or of an earlier run, is moved aside first. If the process is
    killed in between, the next one continues from the unfinished folder, which is complete.
    """
    set_aside(folder)
    os.rename(work_path(folder, "result"), folder)
    fsync(folder.parent)


def set_aside(folder: Path) -> None:
    """Move a result aside. The job that makes it again deletes the old one (delete_work)."""
    aside = work_path(folder, "replaced")
    make_folders(aside.parent)
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(FileNotFoundError):
        os.rename(folder, aside)


def delete_work(folder: Path) -> None:
    """Delete the checkpoints of a result and what killed jobs left of it, but not its lock."""
    for path in work_path(folder).glob("*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != "lock":
            path.unlink(missing_ok=True)
    with suppress(OSError):
        work_path(folder).rmdir()


# --- all results ------------------------------------------------------------------------------


def stored_folders(store: Path, rule: str = "*", is_finished: bool = True) -> list[Path]:
    """Return the folders of all results in a store, or of a rule's, in the order of paths.

    A result without a manifest, which is damaged, is among them.

    is_finished: False for the folders that results of running and killed jobs would have.
    """
    folders = (
        path if is_finished else path.with_name(path.name[1:])
        for path in store.glob(f"{rule}/{'' if is_finished else '.'}*")
        if path.is_dir() and not path.is_symlink() and path.parent.name != REPLIES
    )
    return sorted(folder for folder in folders if KEY.fullmatch(folder.name))


def is_copy(folder: Path) -> bool:
    """Return whether a folder has a manifest of its own, and not a link to one."""
    path = folder / MANIFEST
    return not folder.is_symlink() and path.is_file() and not path.is_symlink()


def walk_files(folder: Path) -> Iterator[Path]:
    """Yield all files and links below a folder; links are not followed.

    Folders with a manifest of their own are other results.
    """
    for parent, folders, files in os.walk(folder):
        links = [inner for inner in folders if os.path.islink(os.path.join(parent, inner))]
        folders[:] = [inner for inner in folders if not is_copy(Path(parent, inner))]
        yield from (Path(parent, file) for file in sorted(files + links))


# --- space ------------------------------------------------------------------------------------

# Powers of 1024.
UNITS = ("", "K", "M", "G", "T")


def size_of(folder: Path) -> int:
    """Return the bytes of the files below a folder, from which another process may remove some."""
    size = 0
    for path in walk_files(folder):
        with suppress(OSError):
            size += path.lstat().st_size
    return size


def warn_of_size(store: Path, max_bytes: int) -> None:
    """Print a line if a store uses more space than it should, and how to trim it."""
    num_bytes, limit = sum(map(size_of, stored_folders(store))), format_size(max_bytes)
    if num_bytes > max_bytes:
        warn(
            f"{store} has {format_size(num_bytes)}, and store_max_size is {limit}: python"
            f" scripts/store.py gc --store {store} --max-size {limit.replace(' ', '')} removes what"
            " no build uses"
        )


def format_size(number: float) -> str:
    """Format bytes in the largest unit of which there is one at least."""
    power = min(4, (int(number).bit_length() - 1) // 10) if number else 0
    return f"{number / (1 << 10 * power):,.1f} {UNITS[power]}iB" if power else f"{number} B"


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 500G or 1.5T, in powers of 1024, or raise InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text, re.IGNORECASE)
    if not match:
        raise InputError(f"{text!r} is not a size: write a number and K, M, G or T, such as 500G")
    return int(float(match[1]) * 1024 ** UNITS.index(match[2].upper()))
