"""Two at the same work, and errors of the system: one line each, and nothing lost."""

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
from safetensors import SafetensorError

from conftest import ROOT
from snakechat.workflow.code_digests import code_digests
from snakechat.workflow.errors import system_error_number
from snakechat.workflow.locks import AlreadyLocked, acquire_lock

HOLD = f"""
import os
import sys

sys.path.insert(0, {str(ROOT / "scripts")!r})
from snakechat.workflow.locks import hold

hold(sys.argv[1])
# Not through subprocess, which would close the file whatever we do.
if "with child" in sys.argv:
    os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", "echo $$; exec sleep 60")
else:
    print("held", flush=True)
sys.stdin.read()
"""

PROGRAM = '''
"""Makes a text, and is not ready before somebody says so."""

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
    """A function that starts a command, which is killed at the latest when the test is over."""
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
    """A function that starts a process with the lock; returns it, and its child's number."""

    def start(*arguments):
        process = in_background(sys.executable, "-c", HOLD, tmp_path / "x/lock", *arguments)
        return process, process.stdout.readline().strip()

    return start


def who(process):
    return f"process {process.pid} on {platform.node()}"


def test_a_lock_that_nobody_has_is_taken_and_says_by_whom(tmp_path):
    path = tmp_path / "a/b/lock"
    acquire_lock(path)
    assert path.read_text() == f"process {os.getpid()} on {platform.node()}\n"


def test_what_was_in_the_file_before_is_not_in_it_any_more(tmp_path):
    (tmp_path / "lock").write_text("process 12345678901234567890 on a host of a long name\n" * 9)
    acquire_lock(tmp_path / "lock")
    assert (tmp_path / "lock").read_text() == f"process {os.getpid()} on {platform.node()}\n"


def test_a_lock_that_another_process_has_is_refused_with_its_number_and_host(holder, tmp_path):
    process, _ = holder()
    for _ in range(2):
        with pytest.raises(AlreadyLocked) as locked:
            acquire_lock(tmp_path / "x/lock")
        assert str(locked.value) == who(process)
    # Who was refused has not written its own name there.
    assert (tmp_path / "x/lock").read_text() == f"{who(process)}\n"


def test_another_lock_is_not_in_the_way(holder, tmp_path):
    holder()
    acquire_lock(tmp_path / "x/another")


def test_a_lock_goes_with_its_process_when_that_ends(holder, tmp_path):
    process, _ = holder()
    process.communicate("")
    acquire_lock(tmp_path / "x/lock")


def test_a_lock_goes_with_its_process_when_that_is_killed(holder, tmp_path):
    process, _ = holder()
    process.kill()
    process.wait()
    acquire_lock(tmp_path / "x/lock")
    assert str(os.getpid()) in (tmp_path / "x/lock").read_text()


def test_what_a_killed_process_has_started_does_not_keep_the_lock(holder, tmp_path):
    process, child = holder("with child")
    try:
        process.kill()
        process.wait()
        acquire_lock(tmp_path / "x/lock")
    finally:
        # It lives until here.
        os.kill(int(child), 9)


def refuse(number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    return flock


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_where_there_are_no_locks_work_goes_on_with_a_warning(
    number, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(fcntl, "flock", refuse(number))
    acquire_lock(tmp_path / "lock")
    assert capsys.readouterr().err == (
        f"warning: {tmp_path}/lock: no locks here: see that nothing runs twice\n"
    )


def test_other_errors_of_a_lock_are_not_hidden(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        acquire_lock(tmp_path / "lock")


@pytest.fixture
def program(in_background, tmp_path):
    """A function that starts a program making output/sft/tiny from a text."""
    scripts = tmp_path / "scripts"
    shutil.copytree(ROOT / "scripts/snakechat", scripts / "snakechat")
    (scripts / "make.py").write_text(PROGRAM)
    (tmp_path / "requirements.txt").touch()
    spec = {"rule": "make", "name": "tiny", "path": "output/sft/tiny", "inputs": {}}

    def start(text, **changes):
        settings = {"text": text}
        code = code_digests(scripts / "make.py")
        (tmp_path / f"{text}.json").write_text(
            json.dumps({**spec, "settings": settings, "code": code, **changes})
        )
        command = (sys.executable, "scripts/make.py", "--spec", f"{text}.json")
        return in_background(*command, cwd=tmp_path, stderr=subprocess.STDOUT)

    return start


def text_of(folder):
    """The text in a folder; waits until there is one."""
    end = time.monotonic() + 20
    while not (folder / "text").exists() and time.monotonic() < end:
        time.sleep(0.01)
    return (folder / "text").read_text()


def finish(process):
    """Wait for a program; its exit code and what it said."""
    said, _ = process.communicate(timeout=60)
    return process.returncode, said


def refused(process):
    return (
        1,
        f"error: output/sft/tiny is being made by {who(process)}: wait for it, or stop it\n",
    )


def test_a_result_that_is_being_made_is_refused_in_one_line(program, tmp_path):
    first = program("first")
    text_of(tmp_path / "output/sft/.tiny.tmp")
    assert finish(program("second")) == refused(first)
    assert finish(program("first")) == refused(first)
    # Nothing of the work of the first is touched.
    assert text_of(tmp_path / "output/sft/.tiny.tmp") == "first"
    (tmp_path / "ready").touch()
    assert finish(first) == (0, "")
    assert text_of(tmp_path / "output/sft/tiny") == "first"
    assert json.loads((tmp_path / "output/sft/tiny.manifest.json").read_text())["files"]
    assert finish(program("second")) == (0, "")
    assert text_of(tmp_path / "output/sft/tiny") == "second"


def test_a_result_whose_program_was_killed_can_be_made_at_once(program, tmp_path):
    (tmp_path / "ready").touch()
    assert finish(program("before")) == (0, "")
    (tmp_path / "ready").unlink()
    killed = program("killed")
    text_of(tmp_path / "output/sft/.tiny.tmp")
    assert finish(program("other")) == refused(killed)
    killed.kill()
    killed.wait()
    assert text_of(tmp_path / "output/sft/tiny") == "before"
    (tmp_path / "ready").touch()
    assert finish(program("after")) == (0, "")
    assert text_of(tmp_path / "output/sft/tiny") == "after"
    assert not (tmp_path / "output/sft/.tiny.tmp").exists()


def test_two_results_of_a_folder_are_made_at_the_same_time(program, tmp_path):
    first = program("first")
    other = program("other", name="small", path="output/sft/small")
    assert text_of(tmp_path / "output/sft/.tiny.tmp") == "first"
    assert text_of(tmp_path / "output/sft/.small.tmp") == "other"
    (tmp_path / "ready").touch()
    assert finish(first) == finish(other) == (0, "")


def test_an_error_of_the_system_is_told_in_one_line_that_names_the_file(program, tmp_path):
    # A file stands where a folder has to be.
    (tmp_path / "output").mkdir()
    (tmp_path / "output/sft").touch()
    assert finish(program("text")) == (1, "error: File exists: output/sft\n")


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(28, "No space left on device"), 28),
        (FileNotFoundError(2, "No such file or directory", "x"), 2),
        (OSError("a library's own"), None),
        # As safetensors and tokenizers tell it.
        (SafetensorError("I/O error: No space left on device (os error 28)"), 28),
        (Exception("Permission denied (os error 13)"), 13),
        (SafetensorError("Error while deserializing header: header too large"), None),
        (ValueError("os error 28"), None),
        (KeyError(28), None),
        (RuntimeError(), None),
    ],
)
def test_errors_of_the_system_have_its_number_and_others_none(error, number):
    assert system_error_number(error) == number
