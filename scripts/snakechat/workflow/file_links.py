"""Files that appear a second time without a second copy of their bytes, where the disk allows it.

Standard library only: jobs use this module before their program imports anything else.
"""

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

CHUNK_BYTES = 1 << 20
# ioctl of Linux (btrfs, XFS, bcachefs): the new file shares the blocks of the old one until one of
# them is written.
FICLONE = 0x40049409
# A link is impossible: other file system, file of another user (fs.protected_hardlinks), file
# system without links, too many links.
NO_LINK = (
    *(errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK),
    *(errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL),
)


def link_or_copy(source: Path, target: Path) -> None:
    """Create a file with the bytes of another by hard link, reflink or copy, stored on disk.

    A hard link shares the file: editing one in place edits both. A symbolic link is not followed.

    Raises:
        OSError: The source cannot be read, or the target exists or cannot be written.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        copy(source, target)


def copy(source: Path, target: Path) -> None:
    """Copy a file, by reflink if the file system has it, and store the copy on disk.

    Raises:
        OSError: As link_or_copy; the source is a symbolic link.
    """
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, "rb") as old, target.open("xb") as new:
        cloned = False
        with suppress(OSError):
            fcntl.ioctl(new.fileno(), FICLONE, old.fileno())
            cloned = True
        if not cloned:
            shutil.copyfileobj(old, new, CHUNK_BYTES)
        new.flush()
        os.fsync(new.fileno())
