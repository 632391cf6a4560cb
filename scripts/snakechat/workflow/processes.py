"""Child processes of a job: they receive its signals, hold its lock and end with it.

Standard library only.
"""

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from snakechat.workflow.landlock import end_with_parent

# Signals that ask a job to stop; SIGHUP when its terminal is closed.
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to stop; without SIGHUP if nohup started it."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(each for each in FORWARDED if each != signal.SIGHUP or not ignores_hangup)


@contextmanager
def child_process(
    words: Sequence[str], **options: Any
) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Start a child process; yield it and the signals that this process has received since.

    Args:
        words: The program and its arguments.
        options: Of subprocess.Popen.

    Raises:
        OSError: The program cannot be started.
    """
    process: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def forward(number: int, _: object) -> None:
        received.append(number)
        if process:
            process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in stop_signals()}
    try:
        # It inherits the descriptor of the job's lock.
        process = subprocess.Popen(words, close_fds=False, preexec_fn=end_with_parent, **options)
        # Signals that arrived before it was started.
        for number in received:
            process.send_signal(number)
        yield process, received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process that has ended; 128 + N if signal N ended it."""
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
