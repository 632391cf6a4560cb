"""Records of the entries of a cache: what each is, and where it was made.

Standard library only.
"""

import datetime
import json
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from snakechat.workflow.manifest import Manifest
from snakechat.workflow.result_copies import walk_files

RECORD = "entry.json"
TEXTS = ("rule", "name", "path", "created", "host")


@dataclass(frozen=True)
class Entry:
    """A result in the cache.

    Attributes:
        key: Digest of everything that determines the result.
        folder: Folder with the files of the result.
        rule, name, path: The job and the path of its result, as in its spec.
        created: When it was stored, as an ISO time in UTC.
        host: Name of the machine that stored it.
        num_bytes: Size of its files.
        used: Unix time of the last use.
    """

    key: str
    folder: Path
    rule: str
    name: str
    path: str
    created: str
    host: str
    num_bytes: int
    used: float


def write_entry(path: Path, manifest: Manifest) -> None:
    """Write the record of a new entry."""
    spec = manifest["spec"]
    record = {
        "rule": spec["rule"],
        "name": spec["name"],
        "path": spec["path"],
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "bytes": sum(properties["size"] for properties in manifest["files"].values()),
    }
    with path.open("w") as file:
        json.dump(record, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    # Everyone who may write to the cache may note a use.
    with suppress(OSError):
        path.chmod(path.parent.stat().st_mode & 0o666)


def read_entry(key: str, folder: Path) -> Entry:
    """Return an entry; what its damaged record does not say stays empty."""
    try:
        used = (folder / RECORD).stat().st_mtime
        record = json.loads((folder / RECORD).read_text())
        num_bytes = int(record["bytes"])
        texts = {name: str(record[name]) for name in TEXTS}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        used, num_bytes = newest_time(folder), 0
        texts = dict.fromkeys(TEXTS, "")
    # Control characters of a hostile record would reach the terminal.
    texts = {
        name: "".join(char if char.isprintable() else "?" for char in text)
        for name, text in texts.items()
    }
    return Entry(key, folder / "result", **texts, num_bytes=num_bytes, used=used)


def newest_time(folder: Path) -> float:
    """Return the newest modification time in a folder, itself included; 0 if it is gone."""
    newest = 0.0
    for path in [folder, *(Path(parent) for parent, _, _ in os.walk(folder)), *walk_files(folder)]:
        with suppress(OSError):
            newest = max(newest, path.lstat().st_mtime)
    return newest
