"""Source files are read in a child process: a file may be made to crash or exhaust a parser.

The parsers of parquet and arrow are C++ programs, whose authors do not promise that damaged files
end in an error. A child process that crashes, or exceeds its memory, costs one line.
"""

import contextlib
import ctypes
import json
import mmap
import os
import re
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from snakechat.workflow.errors import InputError

# Memory that reading may take in addition to that of the process before it.
MAX_MEMORY_BYTES = 800 << 20
PR_SET_PDEATHSIG = 1
# The number of a file, and of its last row that was read.
POSITION = struct.Struct("qq")


class Position:
    """The row that a child process read last, in memory that it shares with its parent."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.memory = mmap.mmap(-1, POSITION.size)

    def set(self, file: int, row: int) -> None:
        """Note that a row, numbered from 1, of a file was read."""
        POSITION.pack_into(self.memory, 0, file, row)

    def __str__(self) -> str:
        file, row = POSITION.unpack_from(self.memory)
        return f"{self.files[file]}: after row {row}"


def read_in_child(files: list[Path], read: Callable[[Position], Any]) -> Any:
    """Return read(position), a JSON value, of a child process.

    Args:
        files: The files that are read, for errors.
        read: Notes each row in its position.

    Raises:
        InputError: `read` raised it, crashed, or took too much memory.
        OSError: `read` raised it.
    """
    position = Position(files)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        os.close(source)
        _run_child(parent, sink, read, position)
    os.close(sink)
    try:
        with os.fdopen(source, "rb") as pipe:
            message = pipe.read()
        status = os.waitpid(child, 0)[1]
        child = 0
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return _result(position, message, os.waitstatus_to_exitcode(status))


def _result(position: Position, message: bytes, code: int) -> Any:
    """Return the result of a child that has ended, or raise its error."""
    if code == -signal.SIGKILL:
        raise InputError(f"{position}: the process that reads was killed: is the memory full?")
    if code < 0:
        name = signal.Signals(-code).name
        raise InputError(f"{position}: the file is damaged and crashes its parser ({name})")
    if not message:
        # The child printed its traceback.
        sys.exit(1)
    kind, value = json.loads(message)
    if kind == "InputError":
        raise InputError(value)
    if kind == "MemoryError":
        raise InputError(
            f"{position}: the next rows take more than {MAX_MEMORY_BYTES >> 20} MiB of memory:"
            " the file is damaged or a decompression bomb"
        )
    if kind == "OSError":
        raise OSError(*value)
    return value


def _run_child(
    parent: int, sink: int, read: Callable[[Position], Any], position: Position
) -> NoReturn:
    """Send [kind, value] of the result or the error of read(position), and end the process."""
    try:
        _end_with(parent)
        _limit_memory()
        message: list[Any] = ["result", read(position)]
    except InputError as error:
        message = ["InputError", str(error)]
    except MemoryError:
        message = ["MemoryError", None]
    except OSError as error:
        message = ["OSError", [error.errno, error.strerror, error.filename and str(error.filename)]]
    except KeyboardInterrupt:
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    with os.fdopen(sink, "wb") as pipe:
        pipe.write(json.dumps(message).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the exit handlers of the parent.
    os._exit(0)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _limit_memory() -> None:
    """Have allocations beyond the limit fail (Linux: the limit counts no mapped files)."""
    with contextlib.suppress(OSError):
        import resource

        status = Path("/proc/self/status").read_text()
        if match := re.search(r"VmData:\s+(\d+) kB", status):
            limit = (int(match[1]) << 10) + MAX_MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
