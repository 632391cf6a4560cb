"""The sandbox of unit tests: what passes, and what hostile code cannot do."""

import socket
import struct
import time

import pytest

from snakechat.evaluation import sandbox, sandboxed
from snakechat.workflow.errors import InputError

MEMORY = 256 << 20


@pytest.fixture(autouse=True)
def isolation():
    try:
        sandbox.check_sandbox()
    except InputError as error:
        pytest.skip(str(error))


def passes(code, *tests, seconds=5):
    return sandbox.passes(code, tests, seconds, MEMORY)


def test_code_that_passes_all_its_tests():
    code = "def add(a, b):\n    return a + b\n"
    assert passes(code, "assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'")


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def add(a, b):\n    return a - b\n", "assert add(1, 2) == 3"),
        ("def add(a, b) return a", "pass"),
        ("raise ValueError", "pass"),
        ("import os\nos._exit(0)", "assert False"),
        ("raise SystemExit(0)", "assert False"),
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


def test_each_run_has_a_new_folder():
    assert passes("open('left', 'w')")
    assert passes("import os", "assert os.listdir('.') == []")


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.fork()",
        "import subprocess\nsubprocess.run(['/bin/true'])",
        "import os\nos.execv('/bin/true', ['true'])",
        "import multiprocessing as m\np = m.Process(target=print)\np.start()",
        "import socket\nsocket.socket()",
        "import socket\nsocket.socketpair()",
        "import urllib.request as u\nu.urlopen('http://127.0.0.1:1')",
        "open('/etc/passwd')",
        "open('/usr/lib/x', 'w')",
        "open('/x', 'w')",
        "for i in range(9): open(f'{i}', 'wb').write(bytes(15 << 20))",
        "open('large', 'wb').write(bytes(20 << 20))",
        f"bytearray({MEMORY})",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    ],
)
def test_what_code_cannot_do_raises_in_it(code):
    expected = "(OSError, MemoryError, ValueError)"
    lines = "\n".join(f"    {line}" for line in code.splitlines())
    assert passes(f"try:\n{lines}\nexcept {expected}:\n    pass\nelse:\n    raise SystemExit(1)")


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
        "while True: pass",
        "import time\ntime.sleep(1000)",
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
        passes("pass")
    sandbox._command.cache_clear()


def test_a_system_that_denies_isolation_is_named(monkeypatch):
    failure = ("sh", "-c", "echo bwrap: No permissions to create a new namespace >&2; exit 1")
    monkeypatch.setattr(sandbox, "_command", lambda: [*failure])
    with pytest.raises(InputError, match=r"cannot isolate unit tests .*No permissions to create"):
        sandbox.check_sandbox.__wrapped__()


def test_a_machine_without_a_filter_is_named(monkeypatch):
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "riscv64")
    with pytest.raises(InputError, match="supports x86_64 and aarch64, and this is riscv64"):
        sandbox.check_sandbox.__wrapped__()


def decide(program, machine, number, flags=0):
    """Run a filter on a system call, as the kernel's interpreter does; return its decision."""
    data = struct.pack("=IIQQ", number, sandboxed.AUDIT_ARCH[machine], 0, flags)
    instructions = [*struct.iter_unpack("=HBBI", program)]
    position, accumulator = 0, 0
    while True:
        operation, if_true, if_false, value = instructions[position]
        position += 1
        if operation == sandboxed.LOAD:
            [accumulator] = struct.unpack_from("=I", data, value)
        elif operation == sandboxed.RETURN:
            return value
        else:
            taken = {
                sandboxed.JUMP_EQUAL: accumulator == value,
                sandboxed.JUMP_GREATER_EQUAL: accumulator >= value,
                sandboxed.JUMP_SET: bool(accumulator & value),
            }[operation]
            position += if_true if taken else if_false


@pytest.mark.parametrize("machine", sandboxed.AUDIT_ARCH)
def test_the_filter_of_each_machine(machine):
    program = sandboxed.filter_program(machine)
    other = next(name for name in sandboxed.AUDIT_ARCH if name != machine)
    clone, denied = sandboxed.CLONE[machine], sandboxed.FAIL | 1
    assert all(decide(program, machine, number) == denied for number in sandboxed.DENIED[machine])
    assert decide(program, machine, clone) == denied
    assert decide(program, machine, clone, sandboxed.CLONE_THREAD) == sandboxed.ALLOW
    assert decide(program, machine, sandboxed.CLONE3) == sandboxed.FAIL | 38
    # read and write
    assert decide(program, machine, 0) == decide(program, machine, 1) == sandboxed.ALLOW
    assert decide(program, machine, sandboxed.X32 + 1) == sandboxed.KILL
    assert decide(program, other, 0) == sandboxed.KILL
