"""Locks of builds and jobs."""

import errno
import fcntl
import os
import platform
import subprocess
import sys

import pytest

from conftest import ROOT
from snakechat.workflow.store import AlreadyLocked, acquire_lock

HOLD = f"""
import os
import sys

sys.path.insert(0, {str(ROOT / "scripts")!r})
from snakechat.workflow.store import acquire_lock

acquire_lock(sys.argv[1])
# Not by subprocess, which closes file descriptors in any case.
os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", "echo $$; exec sleep 60")
sys.stdin.read()
"""


def test_a_held_lock_names_its_holder_and_ends_with_it(tmp_path):
    """Children of the holder do not keep it."""
    path = tmp_path / "lock"
    path.write_text("process 12345678901234567890 on a host of a long name\n" * 9)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", HOLD, path], text=True, **pipes)
    child = int(process.stdout.readline())
    name = f"process {process.pid} on {platform.node()}"
    try:
        for _ in range(2):
            with pytest.raises(AlreadyLocked, match=f"^{name}$"):
                acquire_lock(path)
        # The failed attempt does not change the name in the file.
        assert path.read_text() == f"{name}\n"
        process.kill()
        process.wait()
        acquire_lock(path)
        assert str(os.getpid()) in path.read_text()
    finally:
        process.kill()
        # It has been running until here.
        os.kill(child, 9)


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
