"""Limits of what files of strangers may take: memory, time, steps of regular expressions, YAML.

A short text of YAML may stand for billions of values, or for a number of a megabyte. Aliases
(`*name`) and merges (`<<: *name`) repeat values, each level of them as often as the text says; a
number in base 60 (`1:30:00`) takes time that grows with the square of its length.
"""

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import yaml

from snakechat.workflow.errors import InputError

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Standard error, which limited_steps redirects: of one thread at a time.
STANDARD_ERROR = RLock()
# Digits of numbers: of longer integers, arbitrarily many have the same hash.
MAX_DIGITS = {"tag:yaml.org,2002:int": 20, "tag:yaml.org,2002:float": 1000}
# Values that aliases and merges may add to the text's own.
MAX_REPEATED = 100_000
MAX_DEPTH = 100


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


def load_yaml(text: str) -> Any:
    """Return the values of a text.

    Raises:
        ValueError: As root_node, or a value has the form of a date or a number, and is none.
        yaml.YAMLError: The text is not YAML.
    """
    root = root_node(text)
    try:
        return None if root is None else yaml.CSafeLoader("").construct_document(root)
    except (AttributeError, LookupError) as error:
        # Of a tag such as !!timestamp, whose text is none.
        raise ValueError(f"a value does not fit its tag ({error})") from None


def root_node(text: str) -> yaml.Node | None:
    """Return the nodes of a text, whose values can be constructed in time.

    Raises:
        ValueError: Aliases and merges repeat too many values, a value contains itself, a number has
            too many digits, or values are nested too deeply.
        yaml.YAMLError: The text is not YAML.
    """
    depth = 0
    # The parser composes nodes by recursion in C, without a limit.
    for event in yaml.parse(text, yaml.CSafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"values are nested in more than {MAX_DEPTH} levels")
    root = yaml.compose(text, yaml.CSafeLoader)
    if root is not None:
        _count(root, {}, len(text) + MAX_REPEATED)
    return root


def _count(node: yaml.Node, counts: dict[yaml.Node, int], limit: int) -> int:
    """Return how many values a node stands for.

    Args:
        counts: The numbers of the nodes that were counted; 0 while one is being counted.
        limit: What is too many.
    """
    if node in counts:
        if not counts[node]:
            raise ValueError("an alias contains itself: remove it")
        return counts[node]
    counts[node] = 0
    if isinstance(node, yaml.ScalarNode):
        digits, most = len(node.value), MAX_DIGITS.get(node.tag)
        if most is not None and digits > most:
            raise ValueError(f"a number has {digits:,} digits, at most {most:,}")
        counts[node] = 1
        return 1
    children = node.value
    if isinstance(node, yaml.MappingNode):
        children = [each for pair in children for each in pair]
    counts[node] = 1 + sum(_count(child, counts, limit) for child in children)
    if counts[node] > limit:
        raise ValueError(
            f"aliases and merges (*NAME) repeat more than {MAX_REPEATED:,} values: remove some"
        )
    return counts[node]
