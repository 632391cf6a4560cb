"""Verified copies of results: of the files that a manifest lists, by link or copy.

Standard library only: jobs use this module before their program imports anything else.
"""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from snakechat.workflow.digests import file_digests, fsync
from snakechat.workflow.file_links import copy, link_or_copy
from snakechat.workflow.manifest import UNLISTED_FILES, Manifest, parse_manifest, result_key

MANIFEST, MODEL_CARD = "manifest.json", "README.md"


class Damaged(Exception):
    """A result is not what its manifest and its key say; the message has the reason."""


def read_checked_manifest(folder: Path, key: str) -> Manifest:
    """Return the manifest of a result.

    Raises:
        Damaged: It is missing or damaged, belongs to another key, or has paths that lead outside.
        OSError: It cannot be read.
    """
    path = folder / MANIFEST
    try:
        manifest = None if path.is_symlink() else parse_manifest(path.read_text())
    except (FileNotFoundError, UnicodeDecodeError):
        manifest = None
    if manifest is None:
        raise Damaged(f"{MANIFEST} cannot be read")
    try:
        is_of_key = result_key(manifest["spec"], manifest["inputs"]) == key
    except ValueError:
        # NaN, which specs do not have.
        is_of_key = False
    if not is_of_key:
        raise Damaged(f"{MANIFEST} belongs to another result")
    for name, properties in manifest["files"].items():
        inner = PurePosixPath(name)
        is_inside = not inner.is_absolute() and ".." not in inner.parts and "\0" not in name
        if not is_inside or str(inner) != name or inner.name in ("", *UNLISTED_FILES):
            raise Damaged(f"{MANIFEST} lists {name!r}")
        if not isinstance(properties, dict) or properties.keys() != {"size", "sha256"}:
            raise Damaged(f"{MANIFEST} has no size and sha256 of {name!r}")
    return manifest


def check_names(folder: Path, key: str) -> Manifest:
    """Return the manifest of an entry whose files are those that the manifest lists.

    Raises:
        Damaged: They are not.
    """
    manifest = read_checked_manifest(folder, key)
    names = set()
    for path in walk_files(folder):
        name = path.relative_to(folder).as_posix()
        if not stat.S_ISREG(path.lstat().st_mode):
            raise Damaged(f"{name} is not a regular file")
        if name != MANIFEST:
            names.add(name)
    for name in sorted(names ^ manifest["files"].keys()):
        raise Damaged(f"{name} is {'not in the manifest' if name in names else 'missing'}")
    return manifest


def check_content(folder: Path, manifest: Manifest) -> None:
    """Raise Damaged unless the files that a manifest lists have its sizes and digests."""
    files = manifest["files"]
    for name, properties in files.items():
        status = (folder / name).lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != properties["size"]:
            raise Damaged(f"{name} has another size")
    for path, digest in file_digests(folder / name for name in files).items():
        name = path.relative_to(folder).as_posix()
        if digest != files[name]["sha256"]:
            raise Damaged(f"{name} has other content")


def place_result(
    source: Path, target: Path, manifest: Manifest, make_folder: Callable[[Path], None] = Path.mkdir
) -> None:
    """Fill a folder with links to the files of a result, or copies.

    The result is complete with its manifest alone: see place_manifest.

    Args:
        make_folder: Creates a folder.
    """
    folders = {target}
    for name in sorted(manifest["files"]):
        for parent in reversed(PurePosixPath(name).parents[:-1]):
            if target / parent not in folders:
                make_folder(target / parent)
                folders.add(target / parent)
        link_or_copy(source / name, target / name)
    for folder in folders:
        fsync(folder)


def place_manifest(source: Path, target: Path) -> None:
    """Copy the manifest of a result into a folder that has its files."""
    copy(source / MANIFEST, target / MANIFEST)
    fsync(target)


def copy_run_file(
    source: Path, target: Path, make_folder: Callable[[Path], None] = Path.mkdir
) -> None:
    """Copy a file, or a folder with its regular files, that belongs to a run.

    Args:
        make_folder: Creates a folder.

    Raises:
        OSError: It cannot be copied, or the target exists.
    """
    if source.is_symlink() or not source.is_dir():
        copy(source, target)
        return
    make_folder(target)
    for parent, folders, files in os.walk(source):
        below = target / Path(parent).relative_to(source)
        for name in folders:
            make_folder(below / name)
        for name in files:
            if stat.S_ISREG(os.lstat(os.path.join(parent, name)).st_mode):
                copy(Path(parent, name), below / name)


def walk_files(folder: Path) -> Iterator[Path]:
    """Yield all files and links below a folder; links are not followed."""
    for parent, folders, files in os.walk(folder):
        links = [inner for inner in folders if os.path.islink(os.path.join(parent, inner))]
        yield from (Path(parent, file) for file in sorted(files + links))
