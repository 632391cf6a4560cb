"""Errors of the machine as single lines."""

import pytest
import torch
from safetensors import SafetensorError

from snakechat.workflow.errors import describe_error


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
    ],
)
def test_a_system_error_names_its_file_or_the_target(error, line):
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


@pytest.mark.parametrize(("processes", "expected"), [("1", None), ("2", "a: another process")])
def test_a_lost_connection_is_the_end_of_another_process(processes, expected, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", processes)
    line = describe_error(RuntimeError("Connection closed by peer"), "a")
    assert line == (expected and "a: another process of this job has ended")


def test_an_operation_without_a_deterministic_kernel_names_the_setting():
    error = RuntimeError("put_ does not have a deterministic implementation, but you set")
    assert describe_error(error, "output/sft/a") == (
        "output/sft/a: torch has no deterministic kernel of put_ for this device: set"
        " deterministic: false"
    )
