"""A full or read-only disk: an error of one line, before the first job too.

Faults at each change of a job are in tests/unit/workflow/test_publishing.py.
"""

import os
import subprocess

import pytest

SIZE = 8 << 20


@pytest.fixture
def small_disk(sources):
    """The output folder of a workflow, on a disk of SIZE bytes."""
    output = sources.folder / "output"
    output.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", output]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs permission to mount a disk")
    yield output
    subprocess.run(["umount", output], check=True)


def error_of(workflow):
    """Build a target; return the only error, which a build repeats at its end."""
    process = workflow.snakemake("output/models/tiny.manifest.json", "--cores", "2")
    assert process.returncode == 1 and "Traceback" not in process.stdout, process.stdout[-3000:]
    [line] = {line for line in process.stdout.splitlines() if line.startswith("error: ")}
    return line


def test_a_build_on_a_full_or_read_only_disk_ends_in_one_line(sources, small_disk):
    free = os.statvfs(small_disk)
    (small_disk / ".filler").write_bytes(bytes(free.f_bavail * free.f_frsize))
    assert error_of(sources).startswith("error: No space left on device: output")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert error_of(sources).startswith("error: Read-only file system: output")
