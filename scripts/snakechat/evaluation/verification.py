"""Verify responses so that none of them can end or hold up a training.

A response is text of a model: it may overflow a number, nest without end, or make a regular
expression search for hours. It has failed then; whoever wrote the verifier reads why in the log.
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType

# A verifier usually takes less than 1 ms.
MAX_SECONDS = 5.0


def is_verified(verify: Callable[[str], bool], response: str) -> bool:
    """Return whether a verifier accepts a response: False if it raises or takes over MAX_SECONDS.

    Each reason is printed once.
    """
    try:
        with _time_limit(MAX_SECONDS):
            return bool(verify(response))
    except (Exception, TimeLimit) as error:
        _print_once(f"{getattr(verify, '__name__', 'verifier')}: {type(error).__name__}: {error}")
        return False


class TimeLimit(BaseException):
    """A verifier took too long. Not an Exception, which the verifier may catch."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimit after some seconds, in the main thread.

    Python's regular expressions also look for signals while they search.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeLimit(f"took more than {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@cache
def _print_once(reason: str) -> None:
    print(f"a response was scored 0: {reason}"[:300], file=sys.stderr)
