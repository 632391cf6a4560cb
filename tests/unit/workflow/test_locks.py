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


def test_the_name_of_an_earlier_holder_is_overwritten(tmp_path):
    acquire_lock(tmp_path / "a/b/lock")
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


def test_on_a_file_system_without_locks_a_warning_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", failing_flock(errno.ENOLCK))
    acquire_lock(tmp_path / "lock")
    assert capsys.readouterr().err == (
        f"warning: {tmp_path}/lock: this file system has no locks: do not start the same build"
        " twice\n"
    )


def test_other_errors_of_locking_are_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing_flock(errno.EIO))
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
