"""One process at a time: a lock that goes with the process that has it, however it ends."""

import errno
import fcntl
import os
import platform
import sys
from pathlib import Path


class Locked(Exception):
    """Somebody else has the lock: text says who."""


def hold(path):
    """Lock a file for as long as this process lives, or raise Locked.

    flock is let go by the system when the process is killed, so that nothing is ever left locked.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # Empty for the moment in which the other has the lock and has not yet written its name.
        raise Locked(path.read_text().strip() or "another process") from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        print(f"warning: {path}: no locks here: see that nothing runs twice", file=sys.stderr)
    os.truncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
