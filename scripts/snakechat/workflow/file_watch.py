"""Refusal of files that a user's program reads or imports although planning does not know them.

Python reports each file that it opens to an audit hook. Not seen are files that a library opens
without Python, those that another process opens, and which files a folder has.
"""

import contextlib
import importlib.util
import os
import site
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from snakechat.workflow.errors import InputError


class FileWatch:
    """What a program may read of the project.

    A file of the project is one below `project` or the working directory, unless it belongs to an
    installed library.

    Args:
        project: The folder with scripts/ and rewards/.
        known: Files that are part of the program.
        describe: Returns the error for another file.
    """

    def __init__(
        self, project: Path, known: Iterable[Path], describe: Callable[[Path], InputError]
    ) -> None:
        self.folders = _starts(project, Path.cwd())
        self.libraries = _starts(
            sys.prefix, sys.base_prefix, *site.getsitepackages(), site.getusersitepackages()
        )
        self.known = {os.path.realpath(path) for path in known}
        self.describe = describe
        self.error: InputError | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs inside.

        Raises:
            InputError: It opened a file of the project that is not known.
        """
        _install()
        _active.append(self)
        try:
            yield
        finally:
            _active.remove(self)
            if self.error is not None:
                # Even if the program caught the error.
                raise self.error

    def check(self, path: str, flags: int) -> None:
        """Raise the error for a file that is opened, unless the program may read it."""
        path = os.path.realpath(path)
        if flags & os.O_TRUNC or (flags & os.O_CREAT and not os.path.exists(path)):
            # What it writes, it may read.
            self.known.add(path)
        if flags & os.O_ACCMODE == os.O_WRONLY:
            return
        if path.endswith(".pyc"):
            with contextlib.suppress(ValueError):
                path = importlib.util.source_from_cache(path)
        is_unknown = path not in self.known and self._is_of_project(path)
        if is_unknown and os.path.isfile(path) and not _is_quoted(path):
            self.error = self.describe(Path(path))
            raise self.error

    def _is_of_project(self, path: str) -> bool:
        return path.startswith(self.folders) and not path.startswith(self.libraries)


_active: list[FileWatch] = []


@cache
def _install() -> None:
    """Install the audit hook, once. Python has no way to remove one."""
    sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active or event not in ("open", "import"):
        return
    # Imports have the path of a compiled module; Python opens others as files.
    path, flags = (arguments[0], arguments[2]) if event == "open" else (arguments[1], os.O_RDONLY)
    if isinstance(path, (str, bytes, os.PathLike)):
        for watch in list(_active):
            watch.check(os.fsdecode(path), flags or 0)


def _starts(*folders: str | Path) -> tuple[str, ...]:
    """Return what the real paths of files in folders start with."""
    return tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in folders)


def _is_quoted(path: str) -> bool:
    """Return whether a file is opened for a message that quotes a line of the source."""
    if not path.endswith(".py"):
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "linecache":
        frame = frame.f_back
    return frame is not None
