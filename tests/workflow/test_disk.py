"""A full or read-only disk: an error of one line, and no result is lost."""

import contextlib
import os
import shutil
import subprocess

import pytest

RESULT = "output/sft/tiny"
# Makes it stale.
STALE = "sft: {recipes: {tiny: {epochs: 2}}}"
SIZE = 8 << 20


@contextlib.contextmanager
def small_disk(folder):
    """Move a folder to a separate disk of SIZE bytes; restore the folder afterwards."""
    original = folder.with_name(f"{folder.name}.kept")
    folder.rename(original)
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", folder]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        if not mounted:
            pytest.skip("needs permission to mount a disk")
        shutil.copytree(original, folder, symlinks=True, dirs_exist_ok=True)
        yield
    finally:
        if mounted:
            subprocess.run(["umount", folder], check=True)
        shutil.rmtree(folder)
        original.rename(folder)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def errors(workflow, target, *options):
    """Build a target; return the exit code and the errors, which a build repeats at its end."""
    process = workflow.snakemake(f"{target}.manifest.json", "--cores", "2", *options)
    assert "Traceback" not in process.stdout, process.stdout[-3000:]
    lines = process.stdout.replace("\r", "\n").splitlines()
    found = dict.fromkeys(line for line in lines if line.startswith("error: "))
    return process.returncode, list(found)


@pytest.fixture
def copy(quick, tmp_path):
    """A copy of the quick build with an additional config file."""
    copy = quick.copy(tmp_path / "copy")
    copy.options = (*quick.options, "more.yaml")
    return copy


def test_a_read_only_disk_loses_no_result(copy):
    """Full ones are in tests/unit/workflow/test_publishing.py."""
    result = copy.folder / RESULT
    (copy.folder / "more.yaml").write_text(STALE)
    disk = (result / "manifest.json").resolve().parents[1]
    with small_disk(disk):
        before = contents(result)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        code, lines = errors(copy, RESULT)
        assert code == 1 and {line[:29] for line in lines} == {"error: Read-only file system:"}
        assert contents(result) == before
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        assert errors(copy, RESULT) == (0, [])
        assert contents(result) != before


def test_a_build_on_a_full_or_read_only_disk_ends_in_one_line(sources):
    output = sources.folder / "output"
    output.mkdir()
    target = "output/models/tiny"
    with small_disk(output):
        free = os.statvfs(output)
        (output / ".filler").write_bytes(bytes(free.f_bavail * free.f_frsize))
        code, (line,) = errors(sources, target)
        assert (code, line.partition(": output")[0]) == (1, "error: No space left on device")
        subprocess.run(["mount", "-o", "remount,ro", output], check=True)
        code, (line,) = errors(sources, target)
        assert (code, line.partition(": output")[0]) == (1, "error: Read-only file system")
