"""Locks, and concurrent runs of the same job."""

import errno
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import time

import pytest

from conftest import ROOT
from snakechat.workflow.code_digests import code_digests
from snakechat.workflow.locks import AlreadyLocked, acquire_lock

HOLD = f"""
import os
import sys

sys.path.insert(0, {str(ROOT / "scripts")!r})
from snakechat.workflow.locks import acquire_lock

acquire_lock(sys.argv[1])
# Not by subprocess, which closes file descriptors in any case.
if "with child" in sys.argv:
    os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", "echo $$; exec sleep 60")
else:
    print("held", flush=True)
sys.stdin.read()
"""

PROGRAM = '''
"""Write a text, and wait for a file named ready."""

import time
from pathlib import Path

from snakechat.workflow.digests import write_atomically
from snakechat.workflow.job import run


def main(job):
    write_atomically(job.result / "text", job.settings.text)
    while not Path("ready").exists():
        time.sleep(0.01)


if __name__ == "__main__":
    run(main)
'''


@pytest.fixture
def in_background():
    """A function that starts a command, which is killed at the end of the test."""
    started = []

    def start(*command, **options):
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def holder(in_background, tmp_path):
    """A function that starts a process that holds the lock; returns it and the id of its child."""

    def start(*arguments):
        process = in_background(sys.executable, "-c", HOLD, tmp_path / "x/lock", *arguments)
        return process, process.stdout.readline().strip()

    return start


def name_of(process):
    """Return the name that a process writes into its lock."""
    return f"process {process.pid} on {platform.node()}"


def test_a_free_lock_is_acquired_and_names_its_holder(tmp_path):
    path = tmp_path / "a/b/lock"
    acquire_lock(path)
    assert path.read_text() == f"process {os.getpid()} on {platform.node()}\n"


def test_the_name_of_an_earlier_holder_is_overwritten(tmp_path):
    (tmp_path / "lock").write_text("process 12345678901234567890 on a host of a long name\n" * 9)
    acquire_lock(tmp_path / "lock")
    assert (tmp_path / "lock").read_text() == f"process {os.getpid()} on {platform.node()}\n"


def test_a_held_lock_raises_an_error_with_the_id_and_host_of_the_holder(holder, tmp_path):
    process, _ = holder()
    for _ in range(2):
        with pytest.raises(AlreadyLocked) as locked:
            acquire_lock(tmp_path / "x/lock")
        assert str(locked.value) == name_of(process)
    # The failed attempt does not change the name in the file.
    assert (tmp_path / "x/lock").read_text() == f"{name_of(process)}\n"


def test_locks_of_different_files_are_independent(holder, tmp_path):
    holder()
    acquire_lock(tmp_path / "x/another")


def test_a_lock_is_released_when_its_process_ends(holder, tmp_path):
    process, _ = holder()
    process.communicate("")
    acquire_lock(tmp_path / "x/lock")


def test_a_lock_is_released_when_its_process_is_killed(holder, tmp_path):
    process, _ = holder()
    process.kill()
    process.wait()
    acquire_lock(tmp_path / "x/lock")
    assert str(os.getpid()) in (tmp_path / "x/lock").read_text()


def test_children_of_a_killed_process_do_not_keep_its_lock(holder, tmp_path):
    process, child = holder("with child")
    try:
        process.kill()
        process.wait()
        acquire_lock(tmp_path / "x/lock")
    finally:
        # The child has been running until here.
        os.kill(int(child), 9)


def failing_flock(number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    return flock


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_on_a_file_system_without_locks_a_warning_is_printed(number, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", failing_flock(number))
    acquire_lock(tmp_path / "lock")
    assert capsys.readouterr().err == (
        f"warning: {tmp_path}/lock: this file system has no locks: do not start the same build"
        " twice\n"
    )


def test_other_errors_of_locking_are_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing_flock(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        acquire_lock(tmp_path / "lock")


@pytest.fixture
def program(in_background, tmp_path):
    """A function that starts a program that writes a text into output/sft/tiny."""
    scripts = tmp_path / "scripts"
    shutil.copytree(ROOT / "scripts/snakechat", scripts / "snakechat")
    (scripts / "make.py").write_text(PROGRAM)
    spec = {"rule": "make", "name": "tiny", "path": "output/sft/tiny", "inputs": {}}
    spec["requirements"] = {}

    def start(text, **changes):
        settings = {"text": text}
        code = code_digests(scripts / "make.py")
        (tmp_path / f"{text}.json").write_text(
            json.dumps({**spec, "settings": settings, "code": code, **changes})
        )
        command = (sys.executable, "scripts/make.py", "--spec", f"{text}.json")
        return in_background(*command, cwd=tmp_path, stderr=subprocess.STDOUT)

    return start


def text_of(folder, pattern="."):
    """Wait until a folder that matches a pattern contains a text and return it."""
    end = time.monotonic() + 20
    while not (found := list(folder.glob(f"{pattern}/text"))) and time.monotonic() < end:
        time.sleep(0.01)
    [path] = found
    return path.read_text()


def finish(process):
    """Wait for a program; return its exit code and its output."""
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def locked_by(process):
    """Return the exit code and the output of a program while another process makes the result."""
    return (
        1,
        f"error: output/sft/tiny is being made by {name_of(process)}: wait for it, or stop it\n",
    )


def test_a_second_run_fails_while_the_first_makes_the_result(program, tmp_path):
    first = program("first")
    text_of(tmp_path / "output/store/make/tiny", ".*.tmp")
    assert finish(program("second")) == locked_by(first)
    assert finish(program("first")) == locked_by(first)
    # The files of the first run are unchanged.
    assert text_of(tmp_path / "output/store/make/tiny", ".*.tmp") == "first"
    (tmp_path / "ready").touch()
    assert finish(first) == (0, "")
    assert text_of(tmp_path / "output/sft/tiny") == "first"
    assert json.loads((tmp_path / "output/sft/tiny.manifest.json").read_text())["files"]
    assert finish(program("second")) == (0, "")
    assert text_of(tmp_path / "output/sft/tiny") == "second"


def test_after_a_kill_the_result_can_be_made_at_once(program, tmp_path):
    (tmp_path / "ready").touch()
    assert finish(program("before")) == (0, "")
    (tmp_path / "ready").unlink()
    killed = program("killed")
    text_of(tmp_path / "output/store/make/tiny", ".*.tmp")
    assert finish(program("other")) == locked_by(killed)
    killed.kill()
    killed.wait()
    assert text_of(tmp_path / "output/sft/tiny") == "before"
    (tmp_path / "ready").touch()
    assert finish(program("after")) == (0, "")
    assert text_of(tmp_path / "output/sft/tiny") == "after"
    assert not list((tmp_path / "output/store/make/tiny").glob(".*"))


def test_different_results_are_made_at_the_same_time(program, tmp_path):
    first = program("first")
    other = program("other", name="small", path="output/sft/small")
    assert text_of(tmp_path / "output/store/make/tiny", ".*.tmp") == "first"
    assert text_of(tmp_path / "output/store/make/small", ".*.tmp") == "other"
    (tmp_path / "ready").touch()
    assert finish(first) == finish(other) == (0, "")


def test_a_system_error_is_one_line_that_names_the_file(program, tmp_path):
    # A file has the path of a folder.
    (tmp_path / "output").mkdir()
    (tmp_path / "output/sft").touch()
    assert finish(program("text")) == (1, "error: File exists: output/sft\n")
