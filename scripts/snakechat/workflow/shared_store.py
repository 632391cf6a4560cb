"""Copies of results between the store of a build and one that several builds share.

Both have the same folders (snakechat.workflow.store). A copy is a hard link where the file system
allows it, so that **results must be replaced by rename, never written in place.** It is verified
whenever it is taken.

Whatever is wrong with a shared store costs time and a warning, never a build. It is as trustworthy
as everyone who can write to it: its paths are checked, its results are used.

Standard library only: jobs use this module before their program imports anything else.
"""

import os
import shutil
import stat
import uuid
from contextlib import suppress
from pathlib import Path, PurePosixPath

from snakechat.workflow.digests import CHUNK_BYTES, fsync
from snakechat.workflow.errors import warn
from snakechat.workflow.manifest import MANIFEST, RUN_RECORD, Manifest
from snakechat.workflow.store import Damaged, check_result, read_checked_manifest


def take_result(shared: Path, target: Path) -> bool:
    """Copy a result from a shared store, and verify it.

    Args:
        shared: Its folder in the shared store.
        target: Folder to create, in place of what is there.

    Returns:
        Whether the target has the result. If the store's copy is damaged, it is removed.

    Raises:
        OSError: The target cannot be created.
    """
    if not shared.is_dir():
        return False
    # Of a job that was killed.
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    try:
        copy_result(shared, target, check_result(shared, digests=None))
        # The target is a temporary folder, whose name is not the key.
        check_result(target, shared.name)
    except (Damaged, OSError) as problem:
        shutil.rmtree(target, ignore_errors=True)
        # Without a warning where another process removed the result in the meantime.
        if shared.is_dir():
            if isinstance(problem, Damaged):
                warn(f"{shared} is damaged and removed: {problem}")
                remove_result(shared)
            else:
                warn(f"{shared} is ignored: {problem.strerror}: {problem.filename}")
        return False
    with suppress(OSError):
        # The time of the last use.
        os.utime(shared)
    return True


def put_result(folder: Path, shared: Path, replace: bool) -> None:
    """Copy a result into a shared store, unless it has it already.

    Args:
        folder: Folder of the result.
        shared: Its folder in the shared store.
        replace: Whether to copy it in any case, in place of what the store has.
    """
    if shared.is_dir() and not replace:
        return
    temporary = shared.with_name(f".{shared.name}.{uuid.uuid4().hex}.tmp")
    try:
        for path in [*reversed(temporary.parents), temporary]:
            if not path.is_dir():
                make_folder(path)
        copy_result(folder, temporary, read_checked_manifest(folder))
        if replace:
            remove_result(shared)
        try:
            os.rename(temporary, shared)
        except OSError:
            # Another writer was first, or a file server carried the rename out twice.
            if not shared.is_dir():
                raise
        fsync(shared.parent)
    except Damaged as problem:
        warn(f"{folder} is not stored in {shared.parent}: {problem}")
    except OSError as error:
        warn(f"{folder} is not stored in {shared.parent}: {error.strerror}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_result(source: Path, target: Path, manifest: Manifest) -> None:
    """Fill a folder with links to the files of a result, or copies; the manifest comes last.

    Raises:
        OSError: A file is missing, or cannot be read or written.
    """
    folders = {target}
    for name in sorted(manifest["files"]):
        for parent in reversed(PurePosixPath(name).parents[:-1]):
            if target / parent not in folders:
                make_folder(target / parent)
                folders.add(target / parent)
        link_or_copy(source / name, target / name)
    with suppress(FileNotFoundError):
        copy(source / RUN_RECORD, target / RUN_RECORD)
    for folder in folders:
        fsync(folder)
    # With the manifest, the copy is complete.
    copy(source / MANIFEST, target / MANIFEST)
    fsync(target)


def link_or_copy(source: Path, target: Path) -> None:
    """Create a file with the bytes of another by hard link or copy, stored on disk.

    A hard link shares the file: editing one in place edits both. A symbolic link is not followed.

    Raises:
        OSError: The source cannot be read, or the target exists or cannot be written.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        # On another file system, without links, or a file of another user.
        copy(source, target)


def copy(source: Path, target: Path) -> None:
    """Copy a file, and store the copy on disk.

    Raises:
        OSError: As link_or_copy; the source is a symbolic link.
    """
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, "rb") as old, target.open("xb") as new:
        shutil.copyfileobj(old, new, CHUNK_BYTES)
        new.flush()
        os.fsync(new.fileno())


def remove_result(folder: Path) -> bool:
    """Delete a result from a store, renamed first so that nobody finds a part of it.

    Returns:
        Whether it was there and could be removed.
    """
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    try:
        os.rename(folder, aside)
    except OSError:
        return False
    shutil.rmtree(aside, ignore_errors=True)
    return True


def make_folder(folder: Path) -> None:
    """Create a folder with the mode of its parent, whatever the umask: a team may share it."""
    try:
        folder.mkdir()
    except FileExistsError:
        return
    with suppress(PermissionError):
        folder.chmod(stat.S_IMODE(folder.parent.stat().st_mode))
