"""Lines on standard error: errors, warnings, progress; what is shown of hostile text."""

import errno
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from conftest import ROOT
from snakechat.workflow import errors
from snakechat.workflow.errors import (
    InputError,
    ProgressLines,
    describe_error,
    format_duration,
    one_line_errors,
    warn,
)
from snakechat.workflow.printable import printable_line, printable_text


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileNotFoundError(2, "No such file", "x"), "No such file or directory: x"),
        (OSError(28, "No space left on device"), "No space left on device: a"),
        # socket.gaierror has numbers below 0, which are not errnos.
        (OSError(-2, "Name or service not known"), None),
        # Messages of safetensors and tokenizers, which are written in Rust.
        (SafetensorError("I/O error: full (os error 28)"), "No space left on device: a"),
        (SafetensorError("Error while deserializing header: header too large"), None),
        (RuntimeError("Connection closed by peer"), None),
        (
            RuntimeError("put_ does not have a deterministic implementation, but you set"),
            "a: torch has no deterministic kernel of put_ for this device: set"
            " deterministic: false",
        ),
    ],
)
def test_an_error_of_the_machine_is_one_line(error, line):
    assert describe_error(error, "a") == line


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
)
def test_out_of_memory_is_one_line(error):
    line = describe_error(error, "output/sft/a")
    assert line and line.startswith("output/sft/a: out of memory: ")


def test_a_lost_connection_is_the_end_of_another_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = describe_error(RuntimeError("Connection closed by peer"), "a")
    assert line == "a: another process of this job has ended"


# --- tools --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InputError("row 1"), "error: row 1\n"),
        (OSError(errno.EACCES, "Denied", "output/a"), "error: Denied: output/a\n"),
    ],
)
def test_a_tool_ends_with_one_line(error, line, capsys):
    @one_line_errors(code=2)
    def main():
        raise error

    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err == line


PRINTS = """
from snakechat.workflow.errors import one_line_errors
@one_line_errors()
def main():
    print('line')
main()
"""


@pytest.mark.parametrize("is_full", [False, True])
def test_output_that_cannot_be_written(is_full):
    if is_full:
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        # Nobody reads it.
        reader, output = os.pipe()
        os.close(reader)
    process = subprocess.run(
        [sys.executable, "-c", PRINTS],
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(output)
    assert process.returncode == 1
    assert process.stderr == ("error: No space left on device\n" if is_full else "")


# --- hostile text -------------------------------------------------------------------------------

HOSTILE = "\x1b[31m\r\x07\x9b2J\u202eabc\u2066\udcff\x7f"


def test_control_characters_are_escaped(capsys):
    shown = "\\x1b[31m\\r\\x07\\x9b2J\\u202eabc\\u2066\\udcff\\x7f"
    assert printable_line(f"{HOSTILE}\n\t") == shown + "\\n\\t"
    assert printable_text("a\n\tb\x1b") == "a\n\tb\\x1b"
    assert str(InputError(HOSTILE * 1000)).isprintable()
    warn(f"file {HOSTILE}")
    assert capsys.readouterr().err == f"warning: file {shown}\n"


def test_any_text_is_shown_on_one_line():
    # Each character below the first emoji, surrogates included, and some of the others.
    numbers = [*range(0x1F000), *range(0x1F000, 0x110000, 97)]
    random.Random(1).shuffle(numbers)
    for start in range(0, len(numbers), 500):
        text = "".join(map(chr, numbers[start : start + 500]))
        shown = printable_line(text)
        assert len(shown.splitlines()) == 1 and shown == printable_line(shown)
        shown.encode()
        printable_text(text).encode()


def test_long_messages_are_shortened_in_the_middle():
    shown = printable_line("a" * 3_000_000 + "b" * 3_000_000)
    assert shown.startswith("a" * 1000 + " [5,998,000 characters] b")
    assert len(shown) < 2100


# --- progress -----------------------------------------------------------------------------------


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
    assert format_duration(89) == "89 s" and format_duration(12_000) == "3 h 20 min"
