"""Digests of JSON values and files, and atomic writes of small text files.

Standard library only: the workflow imports this module while it plans.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 20


def canonical_json(value: Any) -> str:
    """Return one JSON text per value: sorted keys, no blanks.

    Raises:
        ValueError: The value contains NaN or infinity.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """Return the sha256 (hex) of a JSON value; 1 and 1.0 have the same digest."""

    def normalized(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: normalized(inner) for key, inner in item.items()}
        if isinstance(item, list):
            return [normalized(inner) for inner in item]
        if isinstance(item, float) and item.is_integer():
            return int(item)
        return item

    return hashlib.sha256(canonical_json(normalized(value)).encode()).hexdigest()


def file_digest(path: str | Path) -> str:
    """Return the sha256 (hex) of the bytes of a file."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            sha.update(chunk)
    return sha.hexdigest()


class DigestCache:
    """Cached digests of files; `cache[path]` reads a file only if it changed.

    Entries are keyed by (size, mtime_ns, ctime_ns, inode). ctime is part of the key because an edit
    can restore mtime but not ctime.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.entries = json.loads(self.path.read_text()) if self.path.exists() else {}

    def __getitem__(self, path: str | Path) -> str:
        path = os.path.realpath(path)
        status = os.stat(path)
        key = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        if self.entries.get(path, [None])[0] != key:
            self.entries[path] = [key, file_digest(path)]
            write_atomically(self.path, canonical_json(self.entries))
        return self.entries[path][1]


def write_atomically(path: str | Path, text: str, writer: str | None = None) -> None:
    """Write a small text file; a concurrent reader gets the old or the new text, never a mix.

    Args:
        path: The file; missing parent folders are created.
        text: The content.
        writer: Suffix of the temporary file, unique among the writers of this path. Defaults to the
            process id.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{writer or os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)
