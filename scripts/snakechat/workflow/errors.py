"""What programs print on standard error: errors that users can act on, warnings, and progress.

Each is one line, without a traceback.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from snakechat.workflow.printable import printable_line
from snakechat.workflow.processes import missing_kernel, rank, world_size

# In messages of torch, of cuBLAS, of NCCL, of Linux and of vLLM when it starts, in this order.
OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Failed to CUDA (?:calloc|host alloc)|Cannot allocate memory"
    r"|Free memory on device"
)


class InputError(Exception):
    """A user's mistake or damaged input, reported in one line without a traceback.

    Whatever the message contains, it is printable and of limited length.
    """

    def __init__(self, message: object) -> None:
        super().__init__(printable_line(message))


@cache
def warn(message: str) -> None:
    """Print a warning of one line, once; of several processes, the first one prints it."""
    if rank() == 0:
        print(f"warning: {printable_line(message)}", file=sys.stderr, flush=True)


def describe_error(error: Exception, target: str) -> str | None:
    """Describe an error that users can act on in one line; return None for any other error.

    It is InputError, or an error of the machine such as a full disk.

    target: Path of the result, for errors that name no file.
    """
    if isinstance(error, InputError):
        return str(error)
    if is_out_of_memory(error):
        return f"{target}: out of memory: models need less with lower micro_batch_tokens"
    if world_size() > 1 and re.search("closed by peer|reset by peer|Broken pipe", str(error)):
        return f"{target}: another process of this job has ended"
    if operation := missing_kernel(error):
        return (
            f"{target}: torch has no deterministic kernel of {operation} for this device: set"
            " deterministic: false"
        )
    if denied := denied_line(error):
        return f"{target}: {denied}"
    # Libraries written in Rust put the errno into the message.
    found = re.search(r"\(os error (\d+)\)", str(error))
    number = int(found[1]) if found else getattr(error, "errno", None)
    file = getattr(error, "filename", None) or target
    # socket.gaierror (an unknown host) has negative numbers, which are not errnos.
    return f"{os.strerror(number)}: {printable_line(file)}" if number and number > 0 else None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an allocation failed, on the CPU or on a GPU, or was the cause of an error."""
    if error is None:
        return False
    # Compare names of classes: this module must not import torch.
    classes = {cls.__name__ for cls in type(error).__mro__}
    is_own = classes & {"MemoryError", "OutOfMemoryError"} or OUT_OF_MEMORY.search(str(error))
    return bool(is_own) or is_out_of_memory(error.__cause__)


def denied_line(error: BaseException) -> str | None:
    """Return a line on what the limits of this job denied (scripts/confined.py), if they did."""
    is_denied = isinstance(error, PermissionError) or "Permission denied" in str(error)
    if not is_denied or "SNAKECHAT_HERMETIC" not in os.environ:
        return None
    name = getattr(error, "filename", None)
    denied = f"{printable_line(name)} is denied" if name else printable_line(str(error))
    return (
        f"{denied}: a job reads what its result is made from, writes its result, and has no"
        " network: name the file in the config, or put it into rewards/ and name it in the reward"
        " function (docs/en/security.md); `hermetic: off` lifts the limits"
    )


# --- tools ----------------------------------------------------------------------------------------


def tool_parser(description: str | None, **options: Any) -> argparse.ArgumentParser:
    """Return the parser of a tool, whose help is its docstring. options: Of ArgumentParser."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **options
    )


@contextmanager
def one_line_errors(code: int = 1) -> Iterator[None]:
    """Decorate `main` of a tool: InputError or OSError ends it with one line and an exit code.

    The end of what reads the output, such as `head`, ends the tool without a message.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(code)
    except OSError as error:
        # What is left of the output, Python would try to write again at its end.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            place = f": {printable_line(error.filename)}" if error.filename else ""
            print(f"error: {error.strerror or error}{place}", file=sys.stderr)
        sys.exit(code)


# --- progress -------------------------------------------------------------------------------------

# The output of a job goes to a terminal and to its log at once, so that it never rewrites a line.


class ProgressLines:
    """Prints lines on standard error, less and less often.

    name: What makes progress, at the start of each line.
    unit: What is counted, in the plural.
    total: Their number at the end; None if it is unknown.
    done: Those that are done already, by an earlier run.
    next_line: Seconds until the first line: a short job prints none.
    """

    def __init__(
        self, name: str, unit: str, total: int | None, done: int = 0, next_line: float = 5
    ) -> None:
        self.name, self.unit, self.total, self.initial = name, unit, total, done
        self.started = time.monotonic()
        self.next, self.has_printed = self.started + next_line, False

    def is_due(self, done: int) -> bool:
        """Return whether it is time for a line; at the end it is, if there were lines before."""
        return time.monotonic() >= self.next or (done == self.total and self.has_printed)

    def update(self, done: int) -> None:
        """Print a line without details, if it is time."""
        if self.is_due(done):
            self.print(done)

    def print(self, done: int, *details: str) -> None:
        """Print a line with the time left, and set the time of the next one."""
        now = time.monotonic()
        seconds = now - self.started
        # The next one is due after a part of the time so far, 10 seconds to a minute.
        self.next, self.has_printed = now + min(max(seconds / 30, 10), 60), True
        of_total = "" if self.total is None else f" of {self.total:,}"
        parts = [f"{done:,}{of_total} {self.unit}", *details]
        if self.total is not None and self.initial < done < self.total:
            left = seconds / (done - self.initial) * (self.total - done)
            parts.append(f"{format_duration(left)} left")
        print(f"{self.name}: {', '.join(parts)}", file=sys.stderr, flush=True)


def in_batches(name: str, unit: str, total: int, size: int) -> Iterator[range]:
    """Yield the numbers from 0 to the total in batches; print the progress in the first process."""
    progress = ProgressLines(name, unit, total)
    for start in range(0, total, size):
        rows = range(start, min(start + size, total))
        yield rows
        if rank() == 0:
            progress.update(rows.stop)


def format_duration(seconds: float) -> str:
    """Return a duration as 5 s, 12 min or 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
