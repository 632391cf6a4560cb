"""The sandbox of unit tests: what passes, and what hostile code cannot do."""

import os
import re
import resource
import socket
import struct
import time
from pathlib import Path

import pytest

from snakechat.evaluation import sandbox, sandbox_program
from snakechat.workflow import kernel_limits
from snakechat.workflow.errors import InputError

MEMORY = 256 << 20


def passes(code, *tests, seconds=5):
    return sandbox.passes(code, tests, seconds, MEMORY)


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("raise ValueError", "pass"),
        ("import os\nos._exit(0)", "assert False"),
        ("print('token')\nimport os\nos._exit(0)", "assert False"),
    ],
)
def test_code_that_fails(code, test):
    assert not passes(code, test)


def test_code_may_use_threads_its_folder_and_the_standard_library():
    assert passes(
        "import math, random, threading\n"
        "thread = threading.Thread(target=lambda: open('x', 'w').write('7'))\n"
        "thread.start()\nthread.join()\n",
        "assert open('x').read() == '7' and math.comb(4, 2) == 6",
    )


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.fork()",
        "import os\nos.execv('/bin/true', ['true'])",
        "import socket\nsocket.socket()",
        "open('/etc/passwd')",
        "open('/usr/lib/x', 'w')",
        "open('large', 'wb').write(bytes(20 << 20))",
        f"bytearray({MEMORY})",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "open('/dev/shm/x', 'wb').write(bytes(1 << 20))",
        "import os\nos.memfd_create('x')",
        "import os\nfor _ in range(40): os.pipe()",
        # add_key: the keyring of the host.
        "import ctypes, os\nnumber = {'x86_64': 248, 'aarch64': 217}[os.uname().machine]\n"
        "if ctypes.CDLL(None).syscall(number, b'user', b'x', b'y', 1, -3) < 0: raise OSError",
    ],
)
def test_what_code_cannot_do_raises_in_it(code):
    assert denied(code)


def denied(code):
    """Return whether code raises the errors of what the sandbox denies."""
    expected = "(OSError, MemoryError, ValueError)"
    lines = "\n".join(f"    {line}" for line in code.splitlines())
    return passes(f"try:\n{lines}\nexcept {expected}:\n    pass\nelse:\n    raise SystemExit(1)")


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
    calls = f"{sandbox_program.ALLOWED},{sandbox_program.OF_ITSELF}"
    table = [call.split() for call in calls.split(",")]
    assert {row[0]: row[column] for row in table if row[column] != "-"} == {
        row[0]: str(known[row[0]]) for row in table if row[0] in known
    }


def test_other_files_stay_as_they_are_and_unread(tmp_path):
    path = tmp_path / "secret"
    path.write_text("secret")
    assert denied(f"open({str(path)!r})")
    for change in (
        "os.remove(p)",
        "os.chmod(p, 0)",
        "os.utime(p)",
        "os.truncate(p, 0)",
        "os.rename(p, p + 'x')",
        "os.link(p, 'x')",
        "os.setxattr(p, 'user.x', b'')",
        "os.rename('/dev/null', p)",
        "open(p, 'a')",
        "os.mkdir(p + 'x')",
    ):
        assert denied(f"import os\np = {str(path)!r}\n{change}"), change
    assert path.read_text() == "secret" and [*tmp_path.iterdir()] == [path]


def test_other_processes_are_not_reached():
    pid = os.getpid()
    for code in (
        f"os.kill({pid}, 0)",
        f"open('/proc/{pid}/environ')",
        f"os.sched_setaffinity({pid}, {{0}})",
        f"resource.prlimit({pid}, resource.RLIMIT_NOFILE, (64, 64))",
        f"fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, {pid})",
        f"os.pidfd_open({pid})",
    ):
        assert denied(f"import os, resource, fcntl\n{code}"), code


def test_a_folder_of_too_many_files_or_bytes_ends_the_code(monkeypatch):
    files = "import time\nfor i in range(6): open(f'{i}', 'wb').write(bytes(15 << 20))\n"
    assert not passes(f"{files}time.sleep(3)")
    assert not passes("import os, time\nfor i in range(2000): os.mkdir(f'{i}')\ntime.sleep(3)")


def test_a_listening_port_is_not_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        port = server.getsockname()[1]
        assert not passes(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))")
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize(
    "code",
    [
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)",
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "import threading\nwhile True:\n"
        "    try:\n        threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()\n"
        "    except RuntimeError:\n        pass",
    ],
)
def test_code_that_does_not_end_is_ended(code, monkeypatch):
    monkeypatch.setattr(sandbox, "WAIT_FACTOR", 1.5)
    started = time.monotonic()
    assert not passes(code, seconds=1)
    assert time.monotonic() - started < 10


@pytest.fixture
def fresh_check():
    """Check the system again, before and after a test that changes what it answers."""
    sandbox.check_sandbox.cache_clear()
    yield
    sandbox.check_sandbox.cache_clear()


def test_a_kernel_without_landlock_is_named(monkeypatch, fresh_check):
    monkeypatch.setattr(sandbox, "landlock_version", lambda: 0)
    with pytest.raises(InputError, match=r"need Landlock \(Linux 5\.13\)"):
        sandbox.passes("pass", [], 5, MEMORY)


def test_a_system_that_denies_isolation_is_named(monkeypatch, fresh_check):
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
        elif operation == kernel_limits.JUMP:
            position += value
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
    program = sandbox_program.sandbox_filter(machine)
    other = next(name for name in kernel_limits.AUDIT_ARCH if name != machine)
    denied, allowed = kernel_limits.FAIL | 1, kernel_limits.ALLOW
    always = sandbox_program.numbers_of(sandbox_program.ALLOWED, machine)
    of_itself = sandbox_program.numbers_of(sandbox_program.OF_ITSELF, machine)
    clone, fcntl = sandbox_program.CLONE[machine], sandbox_program.FCNTL[machine]
    assert all(decide(program, machine, number, 7) == allowed for number in always)
    assert all(decide(program, machine, number, 0) == allowed for number in of_itself)
    assert all(decide(program, machine, number, 7) == denied for number in of_itself)
    others = {*range(600)} - {*always, *of_itself, clone, fcntl, sandbox_program.CLONE3}
    assert all(decide(program, machine, number) == denied for number in others)
    assert decide(program, machine, clone) == denied
    assert decide(program, machine, clone, sandbox_program.CLONE_THREAD | 1) == allowed
    assert decide(program, machine, fcntl, 0, 1) == allowed
    assert decide(program, machine, fcntl, 0, 10) == denied
    assert decide(program, machine, sandbox_program.CLONE3) == kernel_limits.FAIL | 38
    assert decide(program, machine, kernel_limits.X32 + 1) == kernel_limits.KILL
    assert decide(program, other, 0) == kernel_limits.KILL
