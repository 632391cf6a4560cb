"""Lines about the progress of a job."""

from types import SimpleNamespace

import pytest

from snakechat.workflow import errors
from snakechat.workflow.errors import ProgressLines, format_duration


@pytest.fixture
def clock(monkeypatch):
    """A clock whose time a test sets."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(errors, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def run(progress, clock, steps, seconds):
    """Print the lines of steps of some seconds each; return their numbers."""
    printed = []
    for step in steps:
        clock.now += seconds
        if progress.is_due(step):
            progress.print(step, "loss 2")
            printed.append(step)
    return printed


def test_lines_are_complete_and_say_how_long_the_rest_takes(clock, capsys):
    progress = ProgressLines("train_sft mine", "steps", 2000)
    # The second line after 10 seconds, and one at the end.
    assert run(progress, clock, range(1, 2001), 0.006) == [1, 1668, 2000]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "train_sft mine: 1 of 2,000 steps, loss 2, 12 s left",
        "train_sft mine: 1,668 of 2,000 steps, loss 2, 2 s left",
        "train_sft mine: 2,000 of 2,000 steps, loss 2",
    ]


def test_a_long_job_has_a_line_each_minute(clock):
    progress = ProgressLines("x", "steps", 100_000)
    printed = run(progress, clock, range(1, 36_001), 1)
    # Ten hours, of which the first half hour has lines more often.
    assert 600 < len(printed) < 700
    assert all(b - a == 60 for a, b in zip(printed[-100:], printed[-99:], strict=False))


def test_a_resumed_job_estimates_by_its_own_steps_and_a_short_one_prints_nothing(clock, capsys):
    run(ProgressLines("x", "steps", 300, done=100), clock, [101], 2)
    assert capsys.readouterr().err.endswith(", 7 min left\n")
    assert not run(ProgressLines("x", "rows", 4, next_line=5), clock, range(1, 5), 1)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (12_000, "3 h 20 min")]
)
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text
