"""A limit of the memory that data may take: allocations beyond it raise MemoryError."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@contextmanager
def limited_memory(max_bytes: int) -> Iterator[None]:
    """Limit what this process allocates in a context; mapped files do not count.

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
