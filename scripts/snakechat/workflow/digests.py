"""What things are, told by their content: digests of values and files.

Standard library only: the workflow imports this module while it plans, so that a dry run needs
neither torch nor any other library of the training programs.
"""

import hashlib
import json
import os
from pathlib import Path

CHUNK = 1 << 20


def canonical_json(value):
    """One text for each value: keys sorted, no blanks, floats as repr; NaN is refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value):
    """sha256 (hex) of a JSON value. 1 and 1.0 are the same number, however they were written."""

    def plain(item):
        if isinstance(item, dict):
            return {key: plain(inner) for key, inner in item.items()}
        if isinstance(item, list):
            return [plain(inner) for inner in item]
        if isinstance(item, float) and item.is_integer():
            return int(item)
        return item

    return hashlib.sha256(canonical_json(plain(value)).encode()).hexdigest()


def file_digest(path):
    """sha256 (hex) of a file's bytes."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            sha.update(chunk)
    return sha.hexdigest()


class DigestCache:
    """File digests remembered by (size, mtime_ns, ctime_ns, inode), to plan again at no cost.

    ctime is in the key because an edit can restore mtime but not ctime.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.known = json.loads(self.path.read_text()) if self.path.exists() else {}

    def __getitem__(self, path):
        path = os.path.realpath(path)
        status = os.stat(path)
        key = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        if self.known.get(path, [None])[0] != key:
            self.known[path] = [key, file_digest(path)]
            write_atomically(self.path, canonical_json(self.known))
        return self.known[path][1]


def write_atomically(path, text, writer=None):
    """Write a small text file so that a reader sees the old text or the new one, never a part.

    writer: a name that tells this writer from others of the path; without it, its process.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{writer or os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)
