"""The sandbox of unit tests: what passes, and what hostile code cannot do."""

import re
import resource
import socket
import struct
import time
from pathlib import Path

import pytest

from snakechat.evaluation import sandbox, sandbox_program
from snakechat.workflow.errors import InputError

MEMORY = 256 << 20


def passes(code, *tests, seconds=5):
    try:
        sandbox.check_sandbox()
    except InputError as error:
        pytest.skip(str(error))
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
        "assert open('/tmp/x').read() == '7' and math.comb(4, 2) == 6",
    )


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.fork()",
        "import os\nos.execv('/bin/true', ['true'])",
        "import socket\nsocket.socket()",
        "open('/etc/passwd')",
        "open('/usr/lib/x', 'w')",
        "for i in range(9): open(f'{i}', 'wb').write(bytes(15 << 20))",
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
    expected = "(OSError, MemoryError, ValueError)"
    lines = "\n".join(f"    {line}" for line in code.splitlines())
    assert passes(f"try:\n{lines}\nexcept {expected}:\n    pass\nelse:\n    raise SystemExit(1)")


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
    column = 1 + list(sandbox_program.AUDIT_ARCH).index(machine)
    table = [call.split() for call in sandbox_program.ALLOWED.split(",")]
    assert {row[0]: row[column] for row in table if row[column] != "-"} == {
        row[0]: str(known[row[0]]) for row in table if row[0] in known
    }


def test_files_of_the_system_stay_unseen(tmp_path):
    path = tmp_path / "secret"
    path.write_text("secret")
    assert passes(f"import os\nassert not os.path.exists({str(path)!r})")


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


def test_without_bubblewrap_the_reason_is_named(monkeypatch):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    sandbox._command.cache_clear()
    with pytest.raises(InputError, match="bwrap is not installed: install the package bubblewrap"):
        sandbox.passes("pass", [], 5, MEMORY)
    sandbox._command.cache_clear()


def test_a_system_that_denies_isolation_is_named(monkeypatch):
    failure = ("sh", "-c", "echo bwrap: No permissions to create a new namespace >&2; exit 1")
    monkeypatch.setattr(sandbox, "_command", lambda: [*failure])
    with pytest.raises(InputError, match=r"cannot isolate unit tests .*No permissions to create"):
        sandbox.check_sandbox.__wrapped__()


def decide(program, machine, number, flags=0):
    """Run a filter on a system call, as the kernel's interpreter does; return its decision."""
    data = struct.pack("=IIQQ", number, sandbox_program.AUDIT_ARCH[machine], 0, flags)
    instructions = [*struct.iter_unpack("=HBBI", program)]
    position, accumulator = 0, 0
    while True:
        operation, if_true, if_false, value = instructions[position]
        position += 1
        if operation == sandbox_program.LOAD:
            [accumulator] = struct.unpack_from("=I", data, value)
        elif operation == sandbox_program.RETURN:
            return value
        else:
            taken = {
                sandbox_program.JUMP_EQUAL: accumulator == value,
                sandbox_program.JUMP_GREATER_EQUAL: accumulator >= value,
                sandbox_program.JUMP_SET: bool(accumulator & value),
            }[operation]
            position += if_true if taken else if_false


@pytest.mark.parametrize("machine", sandbox_program.AUDIT_ARCH)
def test_the_filter_of_each_machine(machine):
    program = sandbox_program.filter_program(machine)
    other = next(name for name in sandbox_program.AUDIT_ARCH if name != machine)
    clone, denied = sandbox_program.CLONE[machine], sandbox_program.FAIL | 1
    allowed = sandbox_program.allowed_calls(machine)
    assert all(decide(program, machine, number) == sandbox_program.ALLOW for number in allowed)
    others = {*range(600)} - {*allowed, clone, sandbox_program.CLONE3}
    assert all(decide(program, machine, number) == denied for number in others)
    assert decide(program, machine, clone) == denied
    assert decide(program, machine, clone, sandbox_program.CLONE_THREAD) == sandbox_program.ALLOW
    assert decide(program, machine, sandbox_program.CLONE3) == sandbox_program.FAIL | 38
    assert decide(program, machine, sandbox_program.X32 + 1) == sandbox_program.KILL
    assert decide(program, other, 0) == sandbox_program.KILL
