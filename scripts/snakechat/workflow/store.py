"""The store of results: folders that do not change once they exist.

    output/store/RULE/NAME/KEY/       the files of a result, its manifest.json, its run.json
    output/store/RULE/NAME/.KEY.tmp/  a result that a job makes, or made when it was killed
    output/sft/NAME                   a link to the result of train_sft that is up to date

KEY is the digest of everything that determines the result. A result appears by one rename, and
becomes the one that users and jobs read by the rename of a link. Earlier versions stay: a setting
that is changed and set back needs no job.

Standard library only: the workflow imports this module while it plans, and jobs use it before their
program imports anything else.
"""

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from snakechat.workflow.digests import digest, file_digests, fsync
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import (
    MANIFEST,
    UNLISTED_FILES,
    Manifest,
    manifest_path,
    parse_manifest,
)

STORE = Path("output/store")
# Links in the folder of a model, for people: to its evaluation and its report.
PARTS = ("evaluation", "report")
# Digits of a key: the first half of a SHA-256, since the key names a folder.
KEY_DIGITS = 32
KEY = re.compile(f"[0-9a-f]{{{KEY_DIGITS}}}")

# Returns the digests of files by their paths.
FileDigests = Callable[[Iterable[Path]], dict[Path, str]]


class Damaged(Exception):
    """A folder is not the result that its manifest and its key say; the message has the reason."""


# --- one result -------------------------------------------------------------------------------


def store_key(spec: Mapping[str, Any], input_digests: Mapping[str, str]) -> str:
    """Return the digest of everything that determines a result: its spec and its inputs."""
    return digest([spec, input_digests])[:KEY_DIGITS]


def stored_folder(store: Path, rule: str, name: str, key: str) -> Path:
    """Return the folder of a result in a store."""
    return store / rule / name / key


def temporary_folder(folder: Path) -> Path:
    """Return the folder that becomes a result in the store."""
    return folder.with_name(f".{folder.name}.tmp")


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
    try:
        is_of_key = store_key(manifest["spec"], manifest["inputs"]) == (key or folder.name)
    except ValueError:
        # NaN, which specs do not have.
        is_of_key = False
    if not is_of_key:
        raise Damaged(f"{MANIFEST} belongs to another result")
    for name in manifest["files"]:
        inner = PurePosixPath(name)
        is_inside = not inner.is_absolute() and ".." not in inner.parts and "\0" not in name
        if not is_inside or str(inner) != name or inner.name in ("", *UNLISTED_FILES):
            raise Damaged(f"{MANIFEST} lists {name!r}")
    return manifest


def check_files(
    folder: Path, manifest: Manifest, digests: FileDigests | None = file_digests
) -> None:
    """Check that the files of a folder are those of a manifest.

    Args:
        folder: The folder of a result, or a link to it.
        manifest: The manifest.
        digests: Returns the digests of files. With None, names and sizes count alone.

    Raises:
        Damaged: A file is missing, was added, or has another size or content.
        OSError: A file cannot be read.
    """
    files, paths = manifest["files"], {}
    for path in walk_files(folder):
        name = path.relative_to(folder).as_posix()
        if path.name in UNLISTED_FILES or name in PARTS:
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


def is_undamaged(folder: Path, key: str | None = None) -> bool:
    """Return whether a folder is a result with the files of its manifest.

    key: As in read_checked_manifest.
    """
    try:
        check_result(folder, key)
    except (Damaged, OSError):
        return False
    return True


def publish(folder: Path) -> None:
    """Rename the temporary folder of a result into its place in the store.

    A damaged result, or the earlier result of a forced job, is moved aside first. If the process is
    killed in between, the next one continues from the temporary folder, which is complete.
    """
    aside = folder.with_name(f".{folder.name}.old.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(FileNotFoundError):
        os.rename(folder, aside)
    os.rename(temporary_folder(folder), folder)
    fsync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


# --- links ------------------------------------------------------------------------------------


def link_result(path: str | Path, folder: Path) -> None:
    """Have the path of a result, such as output/sft/NAME, lead to a folder of the store.

    Raises:
        InputError: The path has a folder or a file, which no version of a result is.
        OSError: It cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_link(path, os.path.relpath(folder, path.parent))
    replace_link(manifest_path(path), f"{path.name}/{MANIFEST}")
    fsync(path.parent)


def replace_link(path: Path, target: str) -> None:
    """Have a path lead to a target, which is relative to the folder of the path.

    One process at a time does this in a tree.

    Raises:
        InputError: The path has a folder or a file of its own.
        OSError: It cannot be written.
    """
    if path.is_symlink() and os.readlink(path) == target:
        return
    check_link(path)
    temporary = path.with_name(f".{path.name}.link")
    with suppress(FileNotFoundError):
        # Of a process that was killed.
        temporary.unlink()
    try:
        os.symlink(target, temporary)
    except OSError as error:
        # The error names the target.
        raise OSError(error.errno, error.strerror, str(temporary)) from None
    os.replace(temporary, path)


def check_link(path: Path) -> None:
    """Raise InputError if the path of a result has a file or a folder of its own."""
    if os.path.lexists(path) and not path.is_symlink():
        raise InputError(
            f"{path}: expected a link to a folder in {STORE}, found a file or a folder of its own:"
            " move it to another place"
        )


def linked_folder(path: str | Path) -> Path | None:
    """Return the folder of the store that the path of a result leads to; None without a link."""
    try:
        target = os.readlink(path)
    except OSError:
        return None
    return Path(os.path.normpath(Path(path).parent / target))


def linked_folders(output: Path) -> set[Path]:
    """Return the real paths of the folders that results in output/ lead to."""
    found = set()
    for parent, folders, _ in os.walk(output):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        found |= {Path(os.path.realpath(os.path.join(parent, name))) for name in links}
        # Neither the store itself nor hidden folders have links to results.
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and Path(parent, name) != output / STORE.name
        ]
    return found


# --- all results ------------------------------------------------------------------------------


def stored_folders(store: Path) -> Iterator[Path]:
    """Yield the folders of all results in a store, or of a part of it, in the order of the paths.

    A result without a manifest, which is damaged, is among them.
    """
    for parent, folders, _ in os.walk(store):
        folders.sort()
        yield from (Path(parent, name) for name in folders if KEY.fullmatch(name))
        folders[:] = [
            name for name in folders if not name.startswith(".") and not KEY.fullmatch(name)
        ]


def walk_files(folder: Path) -> Iterator[Path]:
    """Yield all files and links below a folder; links are not followed."""
    for parent, folders, files in os.walk(folder):
        links = [inner for inner in folders if os.path.islink(os.path.join(parent, inner))]
        yield from (Path(parent, file) for file in sorted(files + links))
