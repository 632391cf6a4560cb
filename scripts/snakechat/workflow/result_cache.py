"""A cache of finished results, which builds on one or several machines may share.

    FOLDER/3f/3f9a.../result/     the files of the result and its manifest.json
    FOLDER/3f/3f9a.../entry.json  what it is and where it was made; its time is that of the last use
    FOLDER/3f/3f9a.../run/        copies of files of the run, such as run.json and TensorBoard logs
    FOLDER/tmp/                   entries that are being written or deleted

The key of an entry is the digest of everything that determines the result (result_key). Entries
appear and disappear by one rename, on network file systems too; of two writers of one key, the
first one wins. An entry is verified whenever it is taken, since files may be shared: **a result and
its entry are hard links where the file system allows it, so that results must be replaced by
rename, never written in place.** The manifest and model cards (README.md), which people edit, are
copied.

Whatever is wrong with a cache costs time and a warning, never a build. A shared cache is as
trustworthy as everyone who can write to it: its paths are checked, its results are used.

Standard library only: jobs use this module before their program imports anything else.
"""

import os
import re
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from snakechat.workflow.cache_entries import RECORD, Entry, newest_time, read_entry, write_entry
from snakechat.workflow.cache_space import CacheSpace
from snakechat.workflow.digests import Identity, file_identity, fsync
from snakechat.workflow.errors import InputError
from snakechat.workflow.result_copies import (
    Damaged,
    check_content,
    check_names,
    copy_run_file,
    place_manifest,
    place_result,
    read_checked_manifest,
)

NOTHING: Mapping[str, Path] = MappingProxyType({})
KEY = re.compile("[0-9a-f]{64}")
DAY_SECONDS = 24 * 3600
# Seconds between two checks of the size limit, which examine every file of the cache.
COLLECT_INTERVAL = 600
SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class ResultCache:
    """A folder of finished results by key.

    Args:
        folder: The folder; it is created when a result is stored.
        max_bytes: Limit of the space that the cache uses of its own, None for no limit. `put`
            removes the least recently used entries beyond it, at most every ten minutes.
    """

    def __init__(self, folder: Path, max_bytes: int | None) -> None:
        self.folder, self.max_bytes = folder, max_bytes

    def take(self, key: str, target: Path, run_files: Mapping[str, Path] = NOTHING) -> bool:
        """Create the folder of a result from the cache, and verify it.

        Args:
            key: Digest of everything that determines the result.
            target: Folder to create.
            run_files: Files and folders of the run by the names that `put` got. Those of the entry
                replace them; what it does not have is deleted, as it belongs to another run.

        Returns:
            Whether the cache had the result. If not, there is no target. A damaged entry is
            removed.

        Raises:
            OSError: The target exists or cannot be created.
        """
        entry = self._entry_folder(key)
        identity = _identity(entry)
        if identity is None:
            return False
        target.mkdir(parents=True)
        taken = False
        try:
            manifest = check_names(entry / "result", key)
            place_result(entry / "result", target, manifest)
            check_content(target, manifest)
            # The result is complete after the files of its run: a job that is killed in between
            # takes them again.
            for name, path in run_files.items():
                _replace(path, entry / "run" / name)
            place_manifest(entry / "result", target)
            taken = True
        except Damaged as problem:
            # Unless another process removed or replaced the entry in the meantime.
            if _identity(entry) == identity:
                _warn(f"{entry} is damaged and ignored: {problem}")
                with suppress(OSError):
                    self._remove(entry)
        except OSError as error:
            if _identity(entry) == identity:
                _warn(f"{entry} is ignored: {error.strerror}: {error.filename}")
        finally:
            if not taken:
                shutil.rmtree(target, ignore_errors=True)
        if taken:
            with suppress(OSError):
                os.utime(entry / RECORD)
        return taken

    def put(
        self,
        key: str,
        folder: Path,
        run_files: Mapping[str, Path] = NOTHING,
        replace: bool = False,
    ) -> None:
        """Store a finished result, unless the cache has it already.

        Args:
            key: Digest of everything that determines the result.
            folder: Folder of the result, with its manifest.json.
            run_files: Files and folders that belong to the run, not to the result, by names of one
                part. Missing ones are skipped.
            replace: Whether to store it in any case, in place of what the cache has.
        """
        entry = self._entry_folder(key)
        exists = os.path.isdir(entry)
        if exists and not replace:
            return
        try:
            if exists:
                self._remove(entry)
            self._store(key, entry, folder, run_files)
        except Damaged as problem:
            _warn(f"{folder} is not stored in {self.folder}: {problem}")
        except OSError as error:
            _warn(f"{folder} is not stored in {self.folder}: {error.strerror}")
        else:
            self._keep_limit()

    def entries(self) -> list[Entry]:
        """Return all entries, from the least to the most recently used."""
        entries = [
            read_entry(key, folder / key)
            for folder in _subfolders(self.folder)
            for key in _names(folder)
            if KEY.fullmatch(key) and key.startswith(folder.name)
        ]
        return sorted(entries, key=lambda entry: (entry.used, entry.key))

    def collect(self, max_bytes: int | None, max_age_days: float | None) -> list[Entry]:
        """Remove entries that were not used for long, then the least recently used ones.

        Files that results outside the cache share cost no space: they do not count, and an entry
        that consists of them is not removed for its size.

        Args:
            max_bytes: Space that the cache may use of its own, None for any.
            max_age_days: Days after the last use, None for any.

        Returns:
            The entries that were removed.

        Raises:
            OSError: The cache cannot be written.
        """
        now = time.time()
        self._delete_leftovers(now)
        entries = self.entries()
        space = CacheSpace({entry.key: entry.folder for entry in entries})
        removed = []
        for entry in entries:
            is_old = max_age_days is not None and entry.used < now - max_age_days * DAY_SECONDS
            is_too_much = max_bytes is not None and space.num_bytes > max_bytes
            if is_old or (is_too_much and space.uses_own(entry.key)):
                if self._remove(entry.folder.parent):
                    removed.append(entry)
                space.remove(entry.key)
        return removed

    def verify(self) -> list[str]:
        """Return what is wrong with the entries, one line each."""
        problems = []
        for entry in self.entries():
            try:
                check_content(entry.folder, check_names(entry.folder, entry.key))
            except Damaged as problem:
                problems.append(f"{entry.folder}: {problem}")
            except OSError as error:
                problems.append(f"{entry.folder}: {error.strerror}: {error.filename}")
        return problems

    def _entry_folder(self, key: str) -> Path:
        return self.folder / key[:2] / key

    def _temporary_folder(self) -> Path:
        """Return a new name in FOLDER/tmp, which is created."""
        make_folder(self.folder / "tmp")
        return self.folder / "tmp" / uuid.uuid4().hex

    def _store(self, key: str, entry: Path, folder: Path, run_files: Mapping[str, Path]) -> None:
        """Write an entry and rename it to its place.

        Raises:
            Damaged: The folder is not a result with this key.
            OSError: It cannot be read, or the cache cannot be written.
        """
        manifest = read_checked_manifest(folder, key)
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self._temporary_folder()
        try:
            make_folder(temporary)
            make_folder(temporary / "result")
            place_result(folder, temporary / "result", manifest, make_folder=make_folder)
            place_manifest(folder, temporary / "result")
            make_folder(temporary / "run")
            for name, path in run_files.items():
                if path.exists():
                    copy_run_file(path, temporary / "run" / name, make_folder=make_folder)
            write_entry(temporary / RECORD, manifest)
            fsync(temporary)
            make_folder(entry.parent)
            try:
                os.rename(temporary, entry)
            except OSError:
                # Another writer was first, or a file server carried the rename out twice.
                if not entry.is_dir():
                    raise
            fsync(entry.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _remove(self, entry: Path) -> bool:
        """Delete an entry, renamed first so that nobody finds a part of it.

        Returns:
            Whether it was there.

        Raises:
            OSError: The cache cannot be written.
        """
        aside = self._temporary_folder()
        try:
            os.rename(entry, aside)
        except OSError:
            if os.path.isdir(entry):
                raise
            return False
        shutil.rmtree(aside, ignore_errors=True)
        return True

    def _delete_leftovers(self, now: float) -> None:
        """Delete what killed processes left in FOLDER/tmp; younger folders may be in use."""
        for name in _names(self.folder / "tmp"):
            leftover = self.folder / "tmp" / name
            if newest_time(leftover) < now - DAY_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)

    def _keep_limit(self) -> None:
        """Remove what is beyond the size limit, unless that was done a short while ago."""
        stamp = self.folder / "collected"
        try:
            is_recent = abs(time.time() - stamp.stat().st_mtime) < COLLECT_INTERVAL
        except OSError:
            is_recent = False
        if self.max_bytes is None or is_recent:
            return
        with suppress(OSError):
            stamp.touch()
            # Everyone who may write to the cache may note this.
            stamp.chmod(self.folder.stat().st_mode & 0o666)
        try:
            self.collect(self.max_bytes, None)
        except OSError as error:
            _warn(f"{self.folder} may exceed its limit: {error.strerror}")


# --- folders ----------------------------------------------------------------------------------


def _identity(entry: Path) -> Identity | None:
    """Return what differs between an entry and another one in its place; None if there is none."""
    try:
        return file_identity(entry)
    except OSError:
        return None


def make_folder(folder: Path) -> None:
    """Create a folder with the mode of its parent, whatever the umask: a team may share it."""
    try:
        folder.mkdir()
    except FileExistsError:
        return
    with suppress(PermissionError):
        folder.chmod(stat.S_IMODE(folder.parent.stat().st_mode))


def _replace(path: Path, stored: Path) -> None:
    """Replace a file or folder of a run by the stored one, or delete it if there is none.

    An error is a warning: results do not depend on it.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if os.path.lexists(stored):
            path.parent.mkdir(parents=True, exist_ok=True)
            copy_run_file(stored, path)
    except OSError as error:
        _warn(f"{stored} is not restored: {error.strerror}: {error.filename}")


def _names(folder: Path) -> list[str]:
    """Return the sorted names in a folder; none if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _subfolders(folder: Path) -> Iterator[Path]:
    """Yield the folders of the keys with the same first two digits."""
    return (folder / name for name in _names(folder) if re.fullmatch("[0-9a-f]{2}", name))


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


# --- sizes ------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 500G or 1.5T, in powers of 1024.

    Raises:
        InputError: The text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text, re.IGNORECASE)
    if not match:
        raise InputError(f"{text!r} is not a size: write a number and K, M, G or T, such as 500G")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])
