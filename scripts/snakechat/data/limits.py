"""Limits of what files of strangers may take: memory, time, steps of regular expressions."""

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from snakechat.workflow.errors import InputError

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Standard error, which limited_steps redirects: of one thread at a time.
STANDARD_ERROR = RLock()


@contextmanager
def limited_memory(max_bytes: int) -> Iterator[None]:
    """Limit what this process allocates in a context: allocations beyond it raise MemoryError.

    Mapped files do not count.

    max_bytes: Memory in addition to what the process has.
    """
    with open("/proc/self/statm") as file:
        allocated = int(file.read().split()[5]) * PAGE_BYTES
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [allocated + max_bytes, *(each for each in (soft, hard) if each >= 0)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """End this process by SIGPROF after some CPU time of its threads in a context; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def limited_steps(source: str) -> Iterator[None]:
    """Report a regular expression of tokenizer.json that takes too many steps on a text.

    The tokenizers library panics then, and prints a trace, which is dropped here.

    source: What errors call the tokenizer.

    Raises:
        InputError: The library panics in this context.
    """
    sys.stderr.flush()
    # In memory: a file on a disk would take most of the time of a short text.
    with STANDARD_ERROR, open(os.memfd_create("stderr"), "w+b") as printed:
        stderr = os.dup(2)
        os.dup2(printed.fileno(), 2)
        try:
            yield
        except BaseException as error:
            # It is not an Exception, and cannot be imported.
            if type(error).__name__ != "PanicException":
                raise
            raise InputError(
                f"{source}: tokenizer.json cannot encode a text: {error}: correct its regular"
                " expressions"
            ) from None
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        # Of other threads.
        printed.seek(0)
        sys.stderr.write(printed.read().decode(errors="replace"))
