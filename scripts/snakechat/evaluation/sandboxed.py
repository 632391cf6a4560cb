"""The program inside the sandbox: it limits itself, then runs code and its tests.

Reads one line of JSON from standard input: `code`, `tests` (a list), `memory_bytes`, `seconds` and
`token`. Writes the token to standard output if all tests pass. Standard library only.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import struct
import sys

# Files that the code may write, in bytes each.
MAX_FILE_BYTES = 16 << 20

# Linux system calls that start processes or programs, open sockets, or reach other processes
# (the kernel's syscall tables). A process without them is alone: the memory limit is that of all.
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
DENIED = {
    # socket, socketpair, fork, vfork, execve, ptrace, unshare, setns, execveat, io_uring_setup
    "x86_64": (41, 53, 57, 58, 59, 101, 272, 308, 322, 425),
    # unshare, ptrace, socket, socketpair, execve, setns, execveat, io_uring_setup
    "aarch64": (97, 117, 198, 199, 221, 268, 281, 425),
}
CLONE_THREAD = 0x10000
# The first number of the x32 system calls, a second table of x86_64.
X32 = 0x40000000

# Berkeley Packet Filter (linux/bpf_common.h, linux/seccomp.h): operations and return values.
LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
# Offsets in struct seccomp_data.
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2


def filter_program(machine: str) -> bytes:
    """Return the seccomp filter of a machine, as an array of struct sock_filter."""

    def instruction(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", operation, if_true, if_false, value)

    def fail_if(number: int, code: int) -> list[bytes]:
        equal = instruction(JUMP_EQUAL, number, if_false=1)
        return [equal, instruction(RETURN, FAIL | code)]

    program = [
        instruction(LOAD, ARCHITECTURE),
        instruction(JUMP_EQUAL, AUDIT_ARCH[machine], if_true=1),
        instruction(RETURN, KILL),
        instruction(LOAD, NUMBER),
        instruction(JUMP_GREATER_EQUAL, X32, if_false=1),
        instruction(RETURN, KILL),
        # Its flags are in memory, where a filter cannot read them: libc uses clone instead.
        *fail_if(CLONE3, errno.ENOSYS),
    ]
    for number in DENIED[machine]:
        program += fail_if(number, errno.EPERM)
    # Threads are allowed.
    program += [
        instruction(JUMP_EQUAL, CLONE[machine], if_false=3),
        instruction(LOAD, FIRST_ARGUMENT),
        instruction(JUMP_SET, CLONE_THREAD, if_true=1),
        instruction(RETURN, FAIL | errno.EPERM),
        instruction(RETURN, ALLOW),
    ]
    return b"".join(program)


def install_filter() -> None:
    """Deny system calls to this process for good.

    Raises:
        OSError: The kernel rejects the filter.
    """
    program = filter_program(platform.machine())
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions and their address.
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(header)
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def limit(kind: int, value: int) -> None:
    """Set a resource limit that cannot be raised again."""
    resource.setrlimit(kind, (value, value))


def main() -> None:
    """Run the code and its tests; exit with code 0 if all pass."""
    request = json.loads(sys.stdin.buffer.readline())
    output = os.dup(1)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    limit(resource.RLIMIT_AS, request["memory_bytes"])
    limit(resource.RLIMIT_CPU, request["seconds"])
    limit(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
    limit(resource.RLIMIT_CORE, 0)
    install_filter()
    namespace = {"__name__": "solution"}
    try:
        for text in (request["code"], *request["tests"]):
            exec(compile(text, "solution", "exec"), namespace)
    except BaseException:
        # Also SystemExit: code that ends the program has not passed.
        os._exit(1)
    os.write(output, request["token"].encode())
    os._exit(0)


if __name__ == "__main__":
    main()
