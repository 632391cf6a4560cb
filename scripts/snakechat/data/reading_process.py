"""Source files are read in a child process: a file may be made to crash or exhaust a parser.

The parsers of parquet and arrow are C++ programs, whose authors do not promise that damaged files
end in an error. A child process that crashes, or exceeds its memory, costs one line.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

from snakechat.workflow.errors import InputError

# Memory that reading may take in addition to that of the process before it.
MAX_MEMORY_BYTES = 800 << 20
PR_SET_PDEATHSIG = 1


class Position:
    """The row that a child process read last, in memory that it shares with its parent."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.numbers = RawArray("q", 2)

    def set(self, file: int, row: int) -> None:
        """Note that a row, numbered from 1, of a file was read."""
        self.numbers[:] = file, row

    def __str__(self) -> str:
        file, row = self.numbers
        return f"{self.files[file]}: after row {row}"


def read_in_child(files: list[Path], read: Callable[[Position], Any]) -> Any:
    """Return read(position), a JSON value, of a child process.

    Args:
        files: The files that are read, for errors.
        read: Notes each row in its position.

    Raises:
        InputError: `read` raised it or an OSError, crashed, or took too much memory.
    """
    position = Position(files)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, os.getpid(), read, position))
    process.start()
    sender.close()
    message = {}
    try:
        # A child that crashes sends nothing.
        with receiver, contextlib.suppress(EOFError):
            # JSON: a child with a crafted file must not choose what the parent would unpickle.
            message = json.loads(receiver.recv_bytes())
        process.join()
    finally:
        process.kill()
        process.join()
    code = process.exitcode or 0
    if code < 0:
        name = signal.Signals(-code).name
        raise InputError(
            f"{position}: {name} ended the process that reads: the file is damaged, or the memory"
            " is full"
        )
    # The child has printed its error.
    if code:
        sys.exit(code)
    if "error" in message:
        raise InputError(message["error"])
    return message["result"]


def _send_result(
    sender: Connection, parent: int, read: Callable[[Position], Any], position: Position
) -> None:
    """Send {"result": read(position)}, or the message of its error."""
    _end_with(parent)
    try:
        _limit_memory()
        message = {"result": read(position)}
    except MemoryError:
        limit = f"{MAX_MEMORY_BYTES >> 20} MiB"
        message = {"error": f"{position}: the next rows take more than {limit} of memory"}
    except (InputError, OSError) as error:
        message = {"error": str(error)}
    except KeyboardInterrupt:
        sys.exit(1)
    sender.send_bytes(json.dumps(message).encode())


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
