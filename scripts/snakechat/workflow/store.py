"""The store of results: folders that do not change once they exist.

    STORE/RULE/KEY/          the files of a result, its manifest.json, its run.json
    STORE/RULE/.KEY/lock     held by the process that makes it
    STORE/RULE/.KEY/result/  what a job makes, or made when it was killed
    STORE/RULE/.KEY/state/   checkpoints of an interrupted job
    STORE/RULE/.KEY/inputs   RULE/KEY of the results that it reads
    STORE/roots/             the output folders whose links lead to results

KEY is the digest of everything that determines the result, and no name is part of it: recipes, and
builds that use one store, share what is equal. A result appears by one rename. Names are links
(snakechat.workflow.links).

A store is as trustworthy as everyone who can write to it: its paths are checked, its results are
used.

Standard library only: the workflow imports this module while it plans, and jobs use it before their
program imports anything else.
"""

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from snakechat.workflow.digests import MEMORY, DigestCache, file_digests, fsync, write_atomically
from snakechat.workflow.errors import InputError, warn
from snakechat.workflow.locks import make_folders
from snakechat.workflow.manifest import (
    KEY_DIGITS,
    MANIFEST,
    REPLIES,
    STORE,
    UNLISTED_FILES,
    Manifest,
    lock_path,
    read_manifest,
    result_id,
    unfinished_folder,
    work_folder,
)

ROOTS, INPUTS = "roots", "inputs"
KEY = re.compile(f"[0-9a-f]{{{KEY_DIGITS}}}")

# Returns the digests of files by their paths.
FileDigests = Callable[[Iterable[Path]], dict[Path, str]]


class Stored(NamedTuple):
    """A complete result in a store."""

    folder: Path
    manifest: Manifest


def is_writable(store: Path) -> bool:
    """Return whether results can be added to a store, which need not exist."""
    existing = next(folder for folder in (store, *store.absolute().parents) if folder.exists())
    return os.access(existing, os.W_OK | os.X_OK)


# --- one result -------------------------------------------------------------------------------


def manifest_damage(folder: Path, manifest: Manifest, key: str) -> str:
    """Return why a manifest is not the one of the result with a key; "" if it is."""
    if (folder / MANIFEST).is_symlink():
        return f"{MANIFEST} is a link"
    if result_id(manifest).rpartition("/")[2] != key:
        return f"{MANIFEST} belongs to another result"
    for name in manifest["files"]:
        inner = PurePosixPath(name)
        is_inside = not inner.is_absolute() and ".." not in inner.parts and "\0" not in name
        if not is_inside or str(inner) != name or inner.name in ("", *UNLISTED_FILES):
            return f"{MANIFEST} lists {name!r}"
    return ""


def complete_result(folder: Path) -> Stored | None:
    """Return the result in a folder of the store, if its files exist and have their sizes."""
    manifest = read_manifest(folder / MANIFEST)
    if manifest is None or manifest_damage(folder, manifest, folder.name):
        return None
    for name, properties in manifest["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != properties["size"]:
            return None
    return Stored(folder, manifest)


def file_damage(
    folder: Path, manifest: Manifest, digests: FileDigests | None = file_digests
) -> str:
    """Return how the files of a folder differ from a manifest; "" if they do not.

    Args:
        folder: The folder of a result, or a copy of one; in a copy, results within it do not count.
        manifest: The manifest.
        digests: Returns the digests of files. With None, names and sizes count alone.

    Raises:
        OSError: A file cannot be read.
    """
    files, paths = manifest["files"], {}
    for path in walk_files(folder):
        name = path.relative_to(folder).as_posix()
        if path.name in UNLISTED_FILES:
            continue
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is not a regular file"
        if name in files and status.st_size != files[name]["size"]:
            return f"{name} has another size"
        paths[name] = path
    for name in sorted(paths.keys() ^ files.keys()):
        return f"{name} is {'not in the manifest' if name in paths else 'missing'}"
    found = digests(paths.values()) if digests else {}
    for name, path in paths.items():
        if digests and found[path] != files[name]["sha256"]:
            return f"{name} has other content"
    return ""


def result_damage(folder: Path, key: str | None = None, digests: FileDigests = file_digests) -> str:
    """Return what is wrong with a result, its manifest or a file; "" if nothing is.

    Args:
        folder: The folder of the result.
        key: Its key, by default the name of the folder.
        digests: As for file_damage.
    """
    manifest = read_manifest(folder / MANIFEST)
    if manifest is None:
        return f"{MANIFEST} cannot be read"
    try:
        damage = manifest_damage(folder, manifest, key or folder.name)
        return damage or file_damage(folder, manifest, digests)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


def is_undamaged(folder: Path) -> bool:
    """Return whether nothing is wrong with a result; print a warning otherwise.

    A file of which the size, the times and the inode are those of an earlier check is not read
    again: the jobs of a build read the same models and tokens again and again.
    """
    damage = result_damage(folder, digests=checked_digests())
    if damage:
        warn(f"{folder} is damaged and is made again: {damage}")
    return not damage


def checked_digests() -> FileDigests:
    """Return the function that reads files of results which jobs read, each once."""
    return DigestCache(MEMORY / "results.json").digests


def publish(folder: Path) -> None:
    """Rename the unfinished folder of a result into its place in the store.

    A damaged result is moved aside first. If the process is killed in between, the next one
    continues from the unfinished folder, which is complete.
    """
    with suppress(FileNotFoundError):
        set_aside(folder)
    os.rename(unfinished_folder(folder), folder)
    fsync(folder.parent)


def set_aside(folder: Path) -> None:
    """Move a damaged result away, so that the next build makes it again and then deletes it.

    Raises:
        OSError: The store cannot be written.
    """
    aside = work_folder(folder) / "replaced"
    make_folders(aside.parent)
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)


def delete_work(folder: Path) -> None:
    """Delete the checkpoints of a result and what killed jobs left of it, but not its lock."""
    with suppress(FileNotFoundError):
        for path in work_folder(folder).iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path != lock_path(folder):
                path.unlink(missing_ok=True)


def delete_lock(folder: Path) -> None:
    """Delete the lock of a result, which this process holds; one that waits notices that."""
    lock_path(folder).unlink(missing_ok=True)
    # There are checkpoints, or another process has created its lock already.
    with suppress(OSError):
        work_folder(folder).rmdir()


# --- all results ------------------------------------------------------------------------------


def stored_folders(store: Path, rule: str = "") -> list[Path]:
    """Return the folders of all results in a store, or of a rule's, in the order of paths.

    A result without a manifest, which is damaged, is among them.
    """
    rules = [store / rule] if rule else _folders(store)
    return [folder for each in rules for folder in _folders(each) if KEY.fullmatch(folder.name)]


def unfinished_results(store: Path) -> list[Path]:
    """Return the folders that results would have which jobs make, or made when they were killed."""
    return [
        folder.with_name(folder.name[1:])
        for rule in _folders(store)
        for folder in _folders(rule)
        if folder.name.startswith(".") and KEY.fullmatch(folder.name[1:])
    ]


def _folders(parent: Path) -> list[Path]:
    try:
        entries = sorted(os.scandir(parent), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return [parent / name for name in names if name not in (ROOTS, REPLIES)]


def find_results(tree: Path) -> list[Path]:
    """Return the results in a folder and its subfolders: in a store, and copies anywhere else.

    A folder is a result if it has a manifest; in a store, also without one. The folders of links
    that names lead to are none.
    """
    found = []
    for parent, folders, _ in os.walk(tree):
        # Hidden folders belong to jobs that run or were killed.
        paths = [Path(parent, name) for name in sorted(folders) if not name.startswith(".")]
        is_rule = Path(parent).parent in (tree, tree / STORE.name)
        results = [
            path
            for path in paths
            if is_copy(path) or (is_rule and KEY.fullmatch(path.name) and not path.is_symlink())
        ]
        found += results
        folders[:] = [path.name for path in paths if path not in results]
    return found


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

SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def note_inputs(folder: Path, inputs: Iterable[str]) -> None:
    """Note the RULE/KEY of the inputs of a job that makes a result, before it starts."""
    write_atomically(work_folder(folder) / INPUTS, "".join(f"{result}\n" for result in inputs))


def noted_inputs(folder: Path) -> list[str]:
    """Return the keys that note_inputs noted; none if it did not."""
    path = work_folder(folder) / INPUTS
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.rpartition("/")[2] for line in lines]


def warn_of_size(store: Path, max_bytes: int) -> None:
    """Print a line if a store uses more space than it should, and how to trim it."""
    num_bytes = 0
    for path in (path for folder in stored_folders(store) for path in walk_files(folder)):
        # Another process may remove it.
        with suppress(OSError):
            num_bytes += path.lstat().st_size
    if num_bytes > max_bytes:
        limit = format_size(max_bytes)
        warn(
            f"{store} has {format_size(num_bytes)}, and store_max_size is {limit}: python"
            f" scripts/store.py gc --store {store} --max-size {limit.replace(' ', '')} removes what"
            " no build uses"
        )


def format_size(number: float) -> str:
    """Format bytes in the largest unit of which there is one at least."""
    unit = min(4, (int(number).bit_length() - 1) // 10) if number else 0
    name = ("B", "KiB", "MiB", "GiB", "TiB")[unit]
    return f"{number / (1 << 10 * unit):,.1f} {name}" if unit else f"{number} B"


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 500G or 1.5T, in powers of 1024.

    Raises:
        InputError: The text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text, re.IGNORECASE)
    if not match:
        raise InputError(f"{text!r} is not a size: write a number and K, M, G or T, such as 500G")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])
