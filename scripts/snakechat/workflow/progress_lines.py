"""Lines about the progress of a long job, which read well in a terminal, in a log and with `tail`.

The output of a job goes to a terminal and to its log at once, so it never rewrites a line.
"""

import sys
import time
from collections.abc import Iterator

from snakechat.workflow.distributed import rank

# Seconds without a line, of a job that may be short.
FIRST_LINE = 5
# Seconds between two lines: a part of the time so far, within these limits.
SHORTEST, LONGEST = 10, 60
PART_OF_TIME = 1 / 30


class ProgressLines:
    """Prints lines on standard error, less and less often.

    Args:
        name: What makes progress, at the start of each line.
        unit: What is counted, in the plural.
        total: Their number at the end; None if it is unknown.
        done: Those that are done already, by an earlier run.
        next_line: Seconds until the first line.
    """

    def __init__(
        self, name: str, unit: str, total: int | None, done: int = 0, next_line: float = 0
    ) -> None:
        self.name, self.unit, self.total, self.initial = name, unit, total, done
        self.started = time.monotonic()
        self.next = self.started + next_line
        self.has_printed = False

    def is_due(self, done: int) -> bool:
        """Return whether it is time for a line; at the end it is, if there were lines before."""
        return time.monotonic() >= self.next or (done == self.total and self.has_printed)

    def update(self, done: int) -> None:
        """Print a line without details, if it is time."""
        if self.is_due(done):
            self.print(done)

    def print(self, done: int, *details: str) -> None:
        """Print a line with the time left, and set the time of the next one."""
        self.has_printed, now = True, time.monotonic()
        seconds = now - self.started
        self.next = now + min(max(seconds * PART_OF_TIME, SHORTEST), LONGEST)
        of_total = "" if self.total is None else f" of {self.total:,}"
        parts = [f"{done:,}{of_total} {self.unit}", *details]
        if self.total is not None and self.initial < done < self.total:
            left = seconds / (done - self.initial) * (self.total - done)
            parts.append(f"{format_duration(left)} left")
        print(f"{self.name}: {', '.join(parts)}", file=sys.stderr, flush=True)


def in_batches(name: str, unit: str, total: int, size: int) -> Iterator[range]:
    """Yield the numbers from 0 to the total in batches; print the progress in the first process."""
    progress = ProgressLines(name, unit, total, next_line=FIRST_LINE)
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
