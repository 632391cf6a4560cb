"""Errors that users can act on: one line on standard error, without a traceback."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from snakechat.workflow.deterministic import missing_kernel
from snakechat.workflow.distributed import rank, world_size
from snakechat.workflow.printable import printable_line

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

    It is InputError or an error of the machine, which occurs in correct programs: out of memory, a
    full disk, a missing file, the end of another process of the job.

    Args:
        error: The exception that ended main.
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
    # socket.gaierror (an unknown host) has negative numbers, which are not errnos.
    if not number or number < 0:
        return None
    file = getattr(error, "filename", None) or target
    return f"{os.strerror(number)}: {printable_line(file)}"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an allocation failed, on the CPU or on a GPU, or was the cause of an error."""
    while error is not None:
        # Compare names of classes: this module must not import torch.
        classes = {cls.__name__ for cls in type(error).__mro__}
        if not classes.isdisjoint({"MemoryError", "OutOfMemoryError"}):
            return True
        if OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__
    return False


def denied_line(error: BaseException) -> str | None:
    """Return a line on what the limits of this job denied (workflow/hermetic.py), if they did."""
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


# --- the end of tools -----------------------------------------------------------------------------


@contextmanager
def one_line_errors(code: int = 1) -> Iterator[None]:
    """Decorate `main` of a tool: an error that the user can act on ends it with one line.

    They are InputError, and errors of files and of the machine. The end of what reads the output,
    such as `head`, ends the tool without a message.

    Args:
        code: Exit code of an error.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        sys.exit(code)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(code)
    except OSError as error:
        discard_output()
        place = f": {printable_line(error.filename)}" if error.filename else ""
        print(f"error: {error.strerror or error}{place}", file=sys.stderr)
        sys.exit(code)


def discard_output() -> None:
    """Discard what is left of the output, which Python would try to write again at its end."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
