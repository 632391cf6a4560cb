"""Locks that allow one process at a time and end with the process, however it ends.

Not the filelock library: the workflow locks while it plans, in environments with Snakemake alone
(--sdm conda), and filelock fails on file systems without locks, where this module warns.
"""

import errno
import fcntl
import os
import platform
import sys
from pathlib import Path


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
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        # The file is empty between the moment the holder locks it and the moment it writes.
        raise AlreadyLocked(path.read_text().strip() or "another process") from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        print(
            f"warning: {path}: this file system has no locks: do not start the same build twice",
            file=sys.stderr,
        )
    os.truncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
    return descriptor
