"""The sandbox of unit tests: what passes, and what hostile code cannot do."""

import os
import re
import resource
import struct
import tempfile
import time
from pathlib import Path

import pytest

from snakechat.evaluation import sandbox
from snakechat.workflow import kernel_limits
from snakechat.workflow.errors import InputError

MEMORY = 256 << 20


def passes(code, *tests, seconds=5):
    return sandbox.passes(code, tests, seconds, MEMORY)


LARGE = "import time\nfor i in range(6): open(f'{i}', 'wb').write(bytes(15 << 20))\ntime.sleep(3)"
DEEP = "import os, time\nfor i in range({number}):\n    os.mkdir('{name}')\n"
DEEP += "    os.chdir('{name}')\ntime.sleep(3)"
THREADS = "import threading\nwhile True:\n    try:\n"
THREADS += "        threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()\n"
THREADS += "    except RuntimeError: pass"


@pytest.mark.parametrize(
    ("code", "seconds"),
    [
        ("raise ValueError", 5),
        ("import os\nos._exit(0)", 5),
        ("print('token')\nimport os\nos._exit(0)", 5),
        # Too many bytes or files in its folder.
        (LARGE, 5),
        ("import os, time\nfor i in range(2000): os.mkdir(f'{i}')\ntime.sleep(3)", 5),
        # In each other: recursion has no end, or files are hidden where no path can read them.
        (DEEP.format(number=2000, name="d"), 5),
        (DEEP.format(number=20, name="d" * 250), 5),
        # It does not end.
        ("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(99)", 1),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", 1),
        (THREADS, 1),
    ],
)
def test_code_that_fails_writes_too_much_or_does_not_end(code, seconds, monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "WAIT_FACTOR", 1.5)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started = time.monotonic()
    assert not passes(code, "pass", seconds=seconds)
    assert time.monotonic() - started < 10
    # Nothing is left.
    assert not [*tmp_path.iterdir()]


def test_code_may_use_threads_its_folder_and_the_standard_library():
    assert passes(
        "import math, random, threading\n"
        "thread = threading.Thread(target=lambda: open('x', 'w').write('7'))\n"
        "thread.start()\nthread.join()\n",
        "assert open('x').read() == '7' and math.comb(4, 2) == 6",
    )


# Lines that raise an error: P is the path of another file, and PID another process.
DENIED = f"""
os.fork()
os.execv('/bin/true', ['true'])
socket.socket()
open('/etc/passwd')
open('/usr/lib/x', 'w')
open('large', 'wb').write(bytes(20 << 20))
bytearray({MEMORY})
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
open('/dev/shm/x', 'wb').write(bytes(1 << 20))
os.memfd_create('x')
[os.pipe() for _ in range(40)]
add_key()
open(P)
os.remove(P)
os.chmod(P, 0)
os.utime(P)
os.truncate(P, 0)
os.rename(P, P + 'x')
os.link(P, 'x')
os.setxattr(P, 'user.x', b'')
os.rename('/dev/null', P)
open(P, 'a')
os.mkdir(P + 'x')
os.kill(PID, 0)
open(f'/proc/{{PID}}/environ')
os.sched_setaffinity(PID, {{0}})
resource.prlimit(PID, resource.RLIMIT_NOFILE, (64, 64))
fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, PID)
os.pidfd_open(PID)
"""
# add_key reaches the keyring of the host.
ATTEMPT = """
import ctypes, fcntl, os, resource, socket

def add_key():
    number = {{'x86_64': 248, 'aarch64': 217}}[os.uname().machine]
    if ctypes.CDLL(None).syscall(number, b'user', b'x', b'y', 1, -3) < 0:
        raise OSError

P, PID = {path!r}, {pid}
try:
    {line}
except (OSError, MemoryError, ValueError):
    pass
else:
    raise SystemExit(1)
"""


def test_other_files_processes_and_the_network_are_not_reached(tmp_path):
    path = tmp_path / "secret"
    path.write_text("secret")
    assert passes(ATTEMPT.format(path=str(path), pid=os.getpid(), line="raise OSError"))
    for line in DENIED.strip().splitlines():
        assert passes(ATTEMPT.format(path=str(path), pid=os.getpid(), line=line)), line
    assert path.read_text() == "secret" and [*tmp_path.iterdir()] == [path]


def test_code_that_floods_its_output_fails_and_fills_no_memory():
    flood = "import os\nfor fd in range(3, 9):\n    try:\n"
    flood += "        while True: os.write(fd, bytes(1 << 20))\n    except OSError: pass\n"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not passes(flood, seconds=1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4 << 10


@pytest.mark.parametrize(
    ("machine", "header"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        ("aarch64", "/usr/include/asm-generic/unistd.h"),
    ],
)
def test_the_numbers_of_system_calls_are_those_of_the_kernel(machine, header):
    if not Path(header).exists():
        pytest.skip(f"{header} is missing: install linux-libc-dev")
    numbers = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", Path(header).read_text(), re.M)
    known = {name: int(number) for name, number in numbers}
    # The name of the call on other machines.
    known.setdefault("newfstatat", known.get("fstatat"))
    column = 1 + list(kernel_limits.AUDIT_ARCH).index(machine)
    calls = f"{kernel_limits.ALLOWED},{kernel_limits.OF_ITSELF}"
    table = [call.split() for call in calls.split(",")]
    assert {row[0]: row[column] for row in table if row[column] != "-"} == {
        row[0]: str(known[row[0]]) for row in table if row[0] in known
    }


def test_a_system_that_denies_isolation_is_named(monkeypatch):
    sandbox.check_sandbox.cache_clear()
    monkeypatch.setattr(sandbox, "SCRIPTS", "/nonexistent")
    with pytest.raises(InputError, match="which this system lacks or denies"):
        sandbox.passes("pass", [], 5, MEMORY)


def decide(program, machine, number, *arguments):
    """Run a filter on a system call, as the kernel's interpreter does; return its decision."""
    words = [*arguments, *[0] * 6][:6]
    data = struct.pack("=IIQ6Q", number, kernel_limits.AUDIT_ARCH[machine], 0, *words)
    instructions = [*struct.iter_unpack("=HBBI", program)]
    position, accumulator = 0, 0
    while True:
        operation, if_true, if_false, value = instructions[position]
        position += 1
        if operation == kernel_limits.LOAD:
            [accumulator] = struct.unpack_from("=I", data, value)
        elif operation == kernel_limits.AND:
            accumulator &= value
        elif operation == kernel_limits.RETURN:
            return value
        else:
            taken = {
                kernel_limits.JUMP_EQUAL: accumulator == value,
                kernel_limits.JUMP_GREATER_EQUAL: accumulator >= value,
            }[operation]
            position += if_true if taken else if_false


@pytest.mark.parametrize("machine", kernel_limits.AUDIT_ARCH)
def test_the_filter_of_each_machine(machine):
    program = kernel_limits.sandbox_filter(machine)
    other = next(name for name in kernel_limits.AUDIT_ARCH if name != machine)
    denied, allowed = kernel_limits.FAIL | 1, kernel_limits.ALLOW
    always = kernel_limits.numbers_of(kernel_limits.ALLOWED, machine)
    of_itself = kernel_limits.numbers_of(kernel_limits.OF_ITSELF, machine)
    column = list(kernel_limits.AUDIT_ARCH).index(machine)
    clone, fcntl = kernel_limits.CLONE[column], kernel_limits.FCNTL[column]
    assert all(decide(program, machine, number, 7) == allowed for number in always)
    assert all(decide(program, machine, number, 0) == allowed for number in of_itself)
    assert all(decide(program, machine, number, 7) == denied for number in of_itself)
    others = {*range(600)} - {*always, *of_itself, clone, fcntl, kernel_limits.CLONE3}
    assert all(decide(program, machine, number) == denied for number in others)
    assert decide(program, machine, clone) == denied
    assert decide(program, machine, clone, kernel_limits.CLONE_THREAD | 1) == allowed
    assert decide(program, machine, fcntl, 0, 1) == allowed
    assert decide(program, machine, fcntl, 0, 10) == denied
    assert decide(program, machine, kernel_limits.CLONE3) == kernel_limits.FAIL | 38
    assert decide(program, machine, kernel_limits.X32 + 1) == kernel_limits.KILL
    assert decide(program, other, 0) == kernel_limits.KILL
