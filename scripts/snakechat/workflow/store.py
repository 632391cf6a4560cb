"""The store of results: folders that do not change once they exist.

    STORE/RULE/KEY/          the files of a result, its manifest.json, its run.json
    STORE/RULE/.KEY/lock     held by the process that makes it
    STORE/RULE/.KEY/result/  what a job makes, or made when it was killed
    STORE/RULE/.KEY/state/   checkpoints of an interrupted job
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

from snakechat.workflow.digests import CHUNK_BYTES, file_digests, fsync
from snakechat.workflow.locks import make_folders
from snakechat.workflow.manifest import (
    KEY_DIGITS,
    MANIFEST,
    REPLIES,
    RUN_RECORD,
    STORE,
    UNLISTED_FILES,
    Manifest,
    lock_path,
    parse_manifest,
    result_id,
    unfinished_folder,
    work_folder,
)

ROOTS = "roots"
KEY = re.compile(f"[0-9a-f]{{{KEY_DIGITS}}}")

# Returns the digests of files by their paths.
FileDigests = Callable[[Iterable[Path]], dict[Path, str]]


class Damaged(Exception):
    """Raised if the content of a result folder does not match its manifest or its key."""


class Stored(NamedTuple):
    """A complete result in a store."""

    folder: Path
    manifest: Manifest


def is_writable(store: Path) -> bool:
    """Return whether results can be added to a store, which need not exist."""
    existing = next(folder for folder in (store, *store.absolute().parents) if folder.exists())
    return os.access(existing, os.W_OK | os.X_OK)


# --- one result -------------------------------------------------------------------------------


def read_checked_manifest(folder: Path, key: str | None = None) -> Manifest:
    """Return the manifest of a result.

    Args:
        folder: The folder of the result.
        key: Its key, by default the name of the folder.

    Raises:
        Damaged: It is missing or damaged, belongs to another key, or has paths that lead outside.
        OSError: It cannot be read.
    """
    path = folder / MANIFEST
    try:
        manifest = None if path.is_symlink() else parse_manifest(path.read_text())
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        manifest = None
    if manifest is None:
        raise Damaged(f"{MANIFEST} cannot be read")
    if result_id(manifest).rpartition("/")[2] != (key or folder.name):
        raise Damaged(f"{MANIFEST} belongs to another result")
    for name in manifest["files"]:
        inner = PurePosixPath(name)
        is_inside = not inner.is_absolute() and ".." not in inner.parts and "\0" not in name
        if not is_inside or str(inner) != name or inner.name in ("", *UNLISTED_FILES):
            raise Damaged(f"{MANIFEST} lists {name!r}")
    return manifest


def complete_result(folder: Path) -> Stored | None:
    """Return the result in a folder of the store, if its files exist and have their sizes."""
    try:
        manifest = read_checked_manifest(folder)
    except (Damaged, OSError):
        return None
    for name, properties in manifest["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != properties["size"]:
            return None
    return Stored(folder, manifest)


def find_result(stores: Iterable[Path], rule: str, key: str) -> Stored | None:
    """Return a result from the first of several stores that has it complete."""
    found = (complete_result(store / rule / key) for store in stores)
    return next(filter(None, found), None)


def check_files(
    folder: Path, manifest: Manifest, digests: FileDigests | None = file_digests
) -> None:
    """Check that the files of a folder are those of a manifest.

    Args:
        folder: The folder of a result, or a copy of one; in a copy, results within it do not count.
        manifest: The manifest.
        digests: Returns the digests of files. With None, names and sizes count alone.

    Raises:
        Damaged: A file is missing, was added, or has another size or content.
        OSError: A file cannot be read.
    """
    files, paths = manifest["files"], {}
    for path in walk_files(folder):
        name = path.relative_to(folder).as_posix()
        if path.name in UNLISTED_FILES:
            continue
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise Damaged(f"{name} is not a regular file")
        if name in files and status.st_size != files[name]["size"]:
            raise Damaged(f"{name} has another size")
        paths[name] = path
    for name in sorted(paths.keys() ^ files.keys()):
        raise Damaged(f"{name} is {'not in the manifest' if name in paths else 'missing'}")
    found = digests(paths.values()) if digests else {}
    for name, path in paths.items():
        if digests and found[path] != files[name]["sha256"]:
            raise Damaged(f"{name} has other content")


def check_result(
    folder: Path, key: str | None = None, digests: FileDigests | None = file_digests
) -> Manifest:
    """Return the manifest of a result, with the files of which it agrees.

    Args:
        folder: The folder of the result.
        key: As in read_checked_manifest.
        digests: As in check_files.

    Raises:
        Damaged: As in read_checked_manifest and check_files.
        OSError: A file cannot be read.
    """
    manifest = read_checked_manifest(folder, key)
    check_files(folder, manifest, digests)
    return manifest


def is_complete(folder: Path, key: str | None = None) -> bool:
    """Return whether a folder is a result with the files of its manifest.

    key: As in check_result.
    """
    try:
        check_result(folder, key)
    except (Damaged, OSError):
        return False
    return True


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


def copy_result(source: Path, target: Path, manifest: Manifest) -> None:
    """Fill a folder with the files of a result, by hard links where the file system allows it.

    Results are replaced by rename and never written in place, so that both stay as they are. The
    manifest is not copied.

    Raises:
        OSError: A file is missing, or cannot be read or written.
    """
    for name in manifest["files"]:
        path = target / name
        make_folders(path.parent)
        try:
            os.link(source / name, path, follow_symlinks=False)
        except OSError:
            # Another file system, one without links, or a file of another user.
            copy(source / name, path)
    with suppress(FileNotFoundError):
        copy(source / RUN_RECORD, target / RUN_RECORD)


def copy(source: Path, target: Path) -> None:
    """Copy a file, and store the copy on disk.

    Raises:
        OSError: The source cannot be read or is a symbolic link, or the target exists or cannot be
            written.
    """
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, "rb") as old, target.open("xb") as new:
        shutil.copyfileobj(old, new, CHUNK_BYTES)
        new.flush()
        os.fsync(new.fileno())


# --- all results ------------------------------------------------------------------------------


def stored_folders(store: Path, rule: str = "") -> list[Path]:
    """Return the folders of all results in a store, or of those of a rule, in the order of paths.

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
