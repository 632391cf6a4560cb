"""Lines on standard error: errors, warnings, progress; what is shown of hostile text."""

import errno
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

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

MEMORY = "a: out of memory: models need less with lower micro_batch_tokens"
NO_KERNEL = "put_ does not have a deterministic implementation, but you set"
CLOSED = RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    ("error", "processes", "line"),
    [
        (FileNotFoundError(2, "No such file", "x"), 1, "No such file or directory: x"),
        (OSError(28, "No space left on device"), 1, "No space left on device: a"),
        (FileNotFoundError(2, "No such file", "x", None, "y"), 1, "No such file or directory: x"),
        # socket.gaierror has numbers below 0, which are not errnos.
        (OSError(-2, "Name or service not known"), 1, None),
        # Messages of safetensors and tokenizers, which are written in Rust.
        (SafetensorError("I/O error: full (os error 28)"), 1, "No space left on device: a"),
        (SafetensorError("Error while deserializing header: header too large"), 1, None),
        (CLOSED, 1, None),
        (CLOSED, 2, "a: another process of this job has ended"),
        (RuntimeError(NO_KERNEL), 1, "a: torch has no deterministic kernel of put_ for this"),
        (MemoryError(), 1, MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), 1, MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), 1, MEMORY),
    ],
)
def test_an_error_of_the_machine_is_one_line(error, processes, line, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    found = describe_error(error, "a")
    assert found == line or (found and line and found.startswith(line))


# --- tools --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InputError("Denied: output/a"), "Denied: output/a"),
        (OSError(errno.EACCES, "Denied", "output/a"), "Denied: output/a"),
        # What a tool prints may be what the disk has no space for.
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(-2, "Name or service not known"), "Name or service not known"),
    ],
)
def test_a_tool_ends_with_one_line(error, line, capsys):
    @one_line_errors(code=2)
    def main():
        raise error

    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err == f"error: {line}\n"


# --- hostile text -------------------------------------------------------------------------------


def test_control_characters_are_escaped(capsys):
    hostile = "\x1b[31m\r\x07\x9b2J\u202eabc\u2066\udcff\x7f"
    shown = "\\x1b[31m\\r\\x07\\x9b2J\\u202eabc\\u2066\\udcff\\x7f"
    assert printable_line(f"{hostile}\n\t") == shown + "\\n\\t"
    assert printable_text("a\n\tb\x1b") == "a\n\tb\\x1b"
    assert str(InputError(hostile * 1000)).isprintable()
    warn(f"file {hostile}")
    assert capsys.readouterr().err == f"warning: file {shown}\n"


def test_a_long_line_is_shortened_in_the_middle():
    shown = printable_line("a" * 3_000_000 + "b" * 3_000_000)
    assert shown.startswith("a" * 1000 + " [5,998,000 characters] b") and len(shown) < 2100


# --- progress -----------------------------------------------------------------------------------


def test_lines_of_progress_are_complete_and_become_rarer(monkeypatch, capsys):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(errors, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def run(steps, seconds, *arguments, next_line=0):
        """Print the lines of steps of some seconds each; return their numbers."""
        progress, printed = ProgressLines("train_sft mine", *arguments, next_line=next_line), []
        for step in steps:
            clock.now += seconds
            if progress.is_due(step):
                progress.print(step, "loss 2")
                printed.append(step)
        return printed

    # The second line after 10 seconds, and one at the end.
    assert run(range(1, 2001), 0.006, "steps", 2000) == [1, 1668, 2000]
    assert capsys.readouterr().err.splitlines()[1:] == [
        "train_sft mine: 1,668 of 2,000 steps, loss 2, 2 s left",
        "train_sft mine: 2,000 of 2,000 steps, loss 2",
    ]
    # Ten hours, of which the first half hour has lines more often.
    assert 600 < len(run(range(1, 36_001), 1, "steps", 100_000)) < 700
    # A resumed job estimates by its own steps, and a short one prints nothing.
    run([101], 2, "steps", 300, 100)
    assert capsys.readouterr().err.endswith(", 7 min left\n")
    assert not run(range(1, 5), 1, "rows", 4, next_line=5)
    assert format_duration(12_000) == "3 h 20 min"
