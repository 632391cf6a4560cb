"""Verify responses, text or Python code of a model, so that none ends or holds up a training.

Text may overflow a number, nest without end, or make a regular expression search for hours. It has
failed then; whoever wrote the verifier reads why in the log.

Code runs against tests in a process of its own: without a network, other files and other processes.
It reads Python and its libraries, and writes a temporary folder of limited size. The program in it
(snakechat/workflow/kernel_limits.py) limits memory and time, and allows only system calls that stay
inside the process. Code that imitates, from inside, the signal of passed tests is not detected.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType

from snakechat.workflow.errors import InputError, warn
from snakechat.workflow.kernel_limits import AUDIT_ARCH, landlock_version, run_in_sandbox

# Seconds for a verifier of text, which usually takes less than 1 ms.
MAX_SECONDS = 5.0
# The wall-clock limit of code, as a multiple of the CPU limit: code may wait, or share its core.
WAIT_FACTOR = 4
# What the code may write, in files and bytes. They are counted every POLL_SECONDS. Open files that
# it has deleted do not count: the limits of run_in_sandbox bound them to 1 GB.
MAX_FOLDER_FILES, MAX_FOLDER_BYTES = 1024, 64 << 20
POLL_SECONDS = 0.05
# Folders of the system that Python needs.
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin")
# Folder of the modules that the program in the sandbox imports.
SCRIPTS = Path(__file__).resolve().parents[2]


# --- text -----------------------------------------------------------------------------------------


class TimeLimit(BaseException):
    """A verifier took too long. Not an Exception, which the verifier may catch."""


def is_verified(verify: Callable[[str], bool], response: str) -> bool:
    """Return whether a verifier accepts a response: False if it raises or takes over MAX_SECONDS.

    Each reason is printed once. The main thread alone may call it. Python's regular expressions
    also look for signals while they search.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeLimit(f"took more than {MAX_SECONDS:g} s")

    previous = signal.signal(signal.SIGALRM, stop)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
            return bool(verify(response))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
    except (Exception, TimeLimit) as error:
        warn(
            f"a response was scored 0: {getattr(verify, '__name__', 'verifier')}:"
            f" {type(error).__name__}: {error}"
        )
        return False


# --- code -----------------------------------------------------------------------------------------


def passes(code: str, tests: Sequence[str], seconds: int, memory_bytes: int) -> bool:
    """Return whether code and then each of its tests run without an exception.

    Args:
        tests: Programs, such as assert statements. They see what the code defines.
        seconds: Limit for the CPU time; WAIT_FACTOR times as much may pass.
        memory_bytes: Limit for the address space.

    Raises:
        InputError: The system cannot isolate the code.
    """
    # The check itself runs empty code.
    if code or tests:
        check_sandbox()
    token = secrets.token_hex()
    request = {
        **{"code": code, "tests": [*tests], "seconds": seconds, "memory_bytes": memory_bytes},
        **{"token": token, "read": [*SYSTEM_FOLDERS, sys.base_prefix]},
    }
    start = (
        f"import sys; sys.path.append({str(SCRIPTS)!r});"
        f" from {run_in_sandbox.__module__} import run_in_sandbox; run_in_sandbox()"
    )
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    with (
        tempfile.TemporaryDirectory() as folder,
        # A file, whose size the sandbox limits: code that floods its output fills no memory.
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as line,
    ):
        line.write(json.dumps(request).encode() + b"\n")
        line.seek(0)
        process = subprocess.Popen(
            [str(Path(sys.base_prefix, "bin", python)), "-I", "-S", "-B", "-c", start],
            stdin=line,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        deadline = time.monotonic() + WAIT_FACTOR * seconds
        try:
            while process.poll() is None:
                if time.monotonic() > deadline or is_too_large(folder):
                    return False
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
        except OSError:
            # The code may have hidden files in a folder that cannot be read.
            return False
        finally:
            process.kill()
            process.wait()
            # In deep folders, shutil.rmtree exceeds the limit of recursion, or of open files.
            subprocess.run(["sh", "-c", 'chmod -R u+rwx "$0"; rm -rf "$0"', folder])
        output.seek(0)
        return process.returncode == 0 and output.read(len(token) + 1) == token.encode()


def is_too_large(folder: str) -> bool:
    """Return whether a folder has more files or bytes than the code may write.

    Raises:
        OSError: A folder in it cannot be read, or its path is too long.
    """
    number, size, folders = 0, 0, [folder]
    while folders:
        with suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                number += 1
                folders += [entry.path] if entry.is_dir(follow_symlinks=False) else []
                with suppress(FileNotFoundError):
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
        if number > MAX_FOLDER_FILES or size > MAX_FOLDER_BYTES:
            return True
    return False


@cache
def check_sandbox() -> None:
    """Raise InputError if the kernel cannot isolate code, or it or a container denies a filter."""
    if not landlock_version() or not passes("", [], seconds=10, memory_bytes=1 << 30):
        raise InputError(
            f"unit tests of responses need Landlock (Linux 5.13) and seccomp on"
            f" {' or '.join(AUDIT_ARCH)}, which this system lacks or denies: allow them, or do not"
            " use unit tests as a reward"
        )
