"""The space that the entries of a cache use of their own.

Files that results outside the cache share cost no space. The manifest and model cards, which are
small and always copied, do not count.

Standard library only.
"""

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from snakechat.workflow.manifest import UNLISTED_FILES
from snakechat.workflow.result_copies import walk_files

# Device and inode of a file.
Inode = tuple[int, int]


class CacheSpace:
    """The space that only entries use.

    Args:
        folders: Folder of the files of each entry, by key.

    Attributes:
        num_bytes: The space in bytes.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.files: dict[str, list[Inode]] = {}
        # Links from the cache, by file. Two entries may share one.
        self.links: Counter[Inode] = Counter()
        statuses: dict[Inode, os.stat_result] = {}
        for key, folder in folders.items():
            self.files[key] = []
            for path in walk_files(folder):
                # Another process may be deleting the entry.
                with suppress(OSError):
                    status = path.lstat()
                    if path.name not in UNLISTED_FILES:
                        inode = status.st_dev, status.st_ino
                        self.files[key].append(inode)
                        statuses[inode] = status
        for inodes in self.files.values():
            self.links.update(inodes)
        self.sizes = {
            inode: status.st_size
            for inode, status in statuses.items()
            if status.st_nlink <= self.links[inode]
        }
        self.num_bytes = sum(self.sizes.values())

    def uses_own(self, key: str) -> bool:
        """Return whether an entry has a file that nothing outside the cache links to."""
        return any(inode in self.sizes for inode in self.files[key])

    def remove(self, key: str) -> None:
        """Subtract an entry."""
        for inode in self.files[key]:
            self.links[inode] -= 1
            if not self.links[inode]:
                self.num_bytes -= self.sizes.pop(inode, 0)
