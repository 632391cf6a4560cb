"""Locks that allow one process at a time and end with the process, however it ends.

Not the filelock library: the workflow locks while it plans, in environments with Snakemake alone
(--sdm conda), and filelock fails on file systems without locks, where this module warns.
"""

import errno
import fcntl
import os
import platform
import stat
import time
from contextlib import suppress
from pathlib import Path

from snakechat.workflow.errors import InputError, warn

# Seconds between two attempts of a process that waits.
INTERVAL = 0.5


class AlreadyLocked(Exception):
    """Another process holds the lock; the message names it."""


def acquire_lock(path: str | Path) -> int:
    """Lock a file for the lifetime of this process, and write the process's name into it.

    The system releases a flock when the process is killed, so that no lock is ever left behind.
    Programs that this process starts do not inherit it.

    Args:
        path: The file, which is created.

    Returns:
        A file descriptor; os.close releases the lock earlier.

    Raises:
        AlreadyLocked: Another process holds the lock.
    """
    path = Path(path)
    while True:
        make_folders(path.parent)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            # The holder has just deleted the folder.
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            with suppress(FileNotFoundError):
                # The file is empty between the moment the holder locks it and the moment it writes.
                raise AlreadyLocked(path.read_text().strip() or "another process") from None
            continue
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
            warn(f"{path}: this file system has no locks: do not start the same build twice")
        if _is_same_file(descriptor, path):
            break
        # The last holder deleted the file.
        os.close(descriptor)
    with suppress(PermissionError):
        os.fchmod(descriptor, path.parent.stat().st_mode & 0o666)
    # The name is for people: on a full disk, the file is locked without it.
    with suppress(OSError):
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
    return descriptor


def wait_for_lock(path: str | Path) -> int:
    """Lock a file as acquire_lock does, after the process that holds it; print a line then."""
    holder = ""
    while True:
        try:
            return acquire_lock(path)
        except AlreadyLocked as other:
            if str(other) != holder:
                holder = str(other)
                print(f"waiting for {holder}, which makes the same result", flush=True)
        time.sleep(INTERVAL)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def make_folders(folder: Path) -> None:
    """Create a folder and its parents, each with the mode of its parent, whatever the umask.

    A team may share them.

    Raises:
        InputError: A link on the way leads nowhere.
        OSError: A folder cannot be made.
    """
    if folder.is_dir():
        return
    make_folders(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        if folder.is_dir():
            return
        if folder.is_symlink():
            raise InputError(
                f"{folder} leads nowhere: mount its disk, or delete the link"
            ) from None
        raise
    except FileNotFoundError:
        # Another process deleted the parent.
        make_folders(folder)
        return
    with suppress(PermissionError):
        folder.chmod(stat.S_IMODE(folder.parent.stat().st_mode) & ~stat.S_ISVTX)
