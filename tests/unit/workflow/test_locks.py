"""Locks of builds and jobs."""

import errno
import fcntl
import os
import platform
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from conftest import ROOT
from snakechat.rules.functions import LOCK, RuleFunctions, identity_of
from snakechat.workflow.errors import InputError
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


@pytest.fixture
def holder(tmp_path):
    """A function that starts a process that holds the lock; returns it and the id of its child."""
    started = []

    def start(*arguments):
        command = [sys.executable, "-c", HOLD, tmp_path / "x/lock", *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(subprocess.Popen(command, text=True, **pipes))
        return started[-1], started[-1].stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


def name_of(process):
    """Return the name that a process writes into its lock."""
    return f"process {process.pid} on {platform.node()}"


def test_a_held_lock_raises_an_error_with_the_id_and_host_of_the_holder(holder, tmp_path):
    path = tmp_path / "x/lock"
    path.parent.mkdir()
    path.write_text("process 12345678901234567890 on a host of a long name\n" * 9)
    process, _ = holder()
    for _ in range(2):
        with pytest.raises(AlreadyLocked) as locked:
            acquire_lock(path)
        assert str(locked.value) == name_of(process)
    # The failed attempt does not change the name in the file.
    assert path.read_text() == f"{name_of(process)}\n"


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


def test_on_a_file_system_without_locks_a_warning_is_printed(tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    number = errno.ENOLCK
    acquire_lock(tmp_path / "lock")
    assert "this file system has no locks: do not start the same" in capsys.readouterr().err
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        acquire_lock(tmp_path / "lock")


def test_a_build_stops_if_another_one_ran_since_it_was_planned(tmp_path, monkeypatch):
    """The other one may have linked other versions of the inputs."""
    monkeypatch.chdir(tmp_path)
    os.close(acquire_lock(LOCK))
    build = SimpleNamespace(_lock_before=identity_of(LOCK))
    # More than a tick of the clock of the file system.
    time.sleep(0.03)
    os.close(acquire_lock(LOCK))
    with pytest.raises(InputError, match="another build ran here since this one was planned"):
        RuleFunctions._lock(build)
