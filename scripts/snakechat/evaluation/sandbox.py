"""Run untrusted Python code against tests: without a network, other files and other processes.

bubblewrap (bwrap) gives the code namespaces of its own: no network, a temporary folder of limited
size, and of the system only Python and its libraries, read-only.
snakechat/evaluation/sandbox_program.py limits memory and time there, and allows only system calls
that stay inside the process. Code that imitates, from inside, the signal of passed tests is not
detected.
"""

import json
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from snakechat.evaluation import sandbox_program
from snakechat.workflow.errors import InputError

# The wall-clock limit, as a multiple of that of the CPU: code may wait, or share its core.
WAIT_FACTOR = 4
# Size of the temporary folder.
FOLDER_BYTES = 64 << 20
# Folders of the system that Python needs, where they exist.
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin")


def passes(code: str, tests: Sequence[str], seconds: int, memory_bytes: int) -> bool:
    """Return whether code and then each of its tests run without an exception.

    Args:
        tests: Programs, such as assert statements. They see what the code defines.
        seconds: Limit for the CPU time; WAIT_FACTOR times as much may pass.
        memory_bytes: Limit for the address space.

    Raises:
        InputError: The system cannot isolate the code.
    """
    command = _command()
    token = secrets.token_hex()
    request = {"code": code, "tests": list(tests), "seconds": seconds, "token": token}
    # A file, whose size the sandbox limits: code that floods its output fills no memory.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.run(
                command,
                input=json.dumps({**request, "memory_bytes": memory_bytes}).encode() + b"\n",
                stdout=output,
                stderr=subprocess.DEVNULL,
                timeout=WAIT_FACTOR * seconds,
                env={"PYTHONHASHSEED": "0"},
            )
        except subprocess.TimeoutExpired:
            return False
        output.seek(0)
        return process.returncode == 0 and output.read(len(token) + 1) == token.encode()


@cache
def check_sandbox() -> None:
    """Check that this system can isolate code.

    Raises:
        InputError: bwrap is missing, or the kernel or a container denies what it needs.
    """
    if platform.machine() not in sandbox_program.AUDIT_ARCH:
        known = " and ".join(sandbox_program.AUDIT_ARCH)
        raise InputError(
            f"the sandbox of unit tests supports {known}, and this is {platform.machine()}"
        )
    request = {"code": "", "tests": [], "seconds": 10, "memory_bytes": 1 << 30, "token": "token"}
    process = subprocess.run(
        _command(),
        input=json.dumps(request).encode() + b"\n",
        capture_output=True,
        env={},
    )
    if process.stdout != b"token":
        reason = " ".join(process.stderr.decode(errors="replace").split()) or "no output"
        raise InputError(
            f"this system cannot isolate unit tests ({reason[-200:]}): allow user namespaces and"
            " seccomp filters, or do not use unit tests as a reward"
        )


@cache
def _command() -> list[str]:
    """Return the command that runs sandbox_program.py in a sandbox."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise InputError(
            "unit tests of responses run in a sandbox, and bwrap is not installed: install the"
            " package bubblewrap"
        )
    folders = [folder for folder in SYSTEM_FOLDERS if Path(folder).exists()]
    if not sys.base_prefix.startswith("/usr/"):
        folders.append(sys.base_prefix)
    isolation = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    isolation += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    for folder in folders:
        isolation += ["--ro-bind", folder, folder]
    isolation += ["--dev", "/dev", "--size", str(FOLDER_BYTES), "--tmpfs", "/tmp"]
    # Nothing but the temporary folder is writable.
    isolation += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    python = Path(
        sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}"
    )
    program = Path(sandbox_program.__file__).read_text()
    return [bwrap, *isolation, str(python), "-I", "-S", "-B", "-c", program]
