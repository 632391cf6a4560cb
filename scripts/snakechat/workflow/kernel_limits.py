"""What the kernel denies to a process: files and ports by Landlock, system calls by a filter.

Landlock (landlock(7), Linux 5.13) lets a process read, write and connect to what it names, and
nothing else. A filter (seccomp(2)) sees the number of a system call and its arguments, but no
memory that they point to. Both hold for all threads that the calling thread starts later and for
all programs that these run, whichever language reads, and nothing can lift them. What a job may use
is decided in hermetic.py, and scripts/confined.py applies it.

Standard library only: it runs before the first import of a program.
"""

import ctypes
import errno
import os
import platform
import stat
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

# --- Landlock ---------------------------------------------------------------------------------

# System calls, with the same numbers on x86_64 and aarch64.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
CREATE_RULESET_VERSION = 1
RULE_PATH_BENEATH, RULE_NET_PORT = 1, 2

# Rights on files, and the version of Landlock that has them (linux/landlock.h).
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
# Remove and make files of all kinds, apart from devices.
MAKE = (1 << 4) | (1 << 5) | (1 << 7) | (1 << 8) | (1 << 9) | (1 << 10) | (1 << 12)
WRITE = READ | WRITE_FILE | MAKE | REFER | TRUNCATE
DEVICE = READ_FILE | WRITE_FILE | READ_DIR | IOCTL_DEV
ON_FILES = EXECUTE | READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV
FILE_RIGHTS = ((1, (1 << 13) - 1), (2, REFER), (3, TRUNCATE), (5, IOCTL_DEV))
# Rights on TCP ports (version 4), and what stays inside: abstract Unix sockets and signals (6).
BIND_TCP, CONNECT_TCP = 1 << 0, 1 << 1
NETWORK_VERSION, SCOPE_VERSION = 4, 6
SCOPE_SOCKETS_AND_SIGNALS = (1 << 0) | (1 << 1)

PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
# With one of these, a process reads the memory and the environment of others: CAP_SYS_PTRACE,
# CAP_SYS_ADMIN and CAP_PERFMON.
READING_CAPABILITIES = (19, 21, 38)
ALL_CAPABILITIES = range(64)
CAPABILITY_VERSION = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 if it has none, or has disabled it.

    It is 0 also on a machine whose system calls this module does not know.
    """
    if platform.machine() not in AUDIT_ARCH:
        return 0
    return max(int(libc.syscall(CREATE_RULESET, None, 0, CREATE_RULESET_VERSION)), 0)


def restrict(
    *,
    read: Iterable[str],
    folders: Iterable[str] = (),
    write: Iterable[str] = (),
    devices: Iterable[str] = (),
    ports: Iterable[int] | None = (),
    listens: Iterable[int] = (),
) -> None:
    """Limit this thread, and what it starts from now on, for good.

    The rights that the kernel's version of Landlock does not know stay unlimited. A path that does
    not exist is skipped. Raises OSError if the kernel has no Landlock, or denies a call.

    Args:
        read: Files, and folders below which all may be read and run.
        folders: Folders below which file names may be read, but no files.
        write: Files and folders that may also be written.
        devices: Device files, and folders of them.
        ports: TCP ports to which it may connect; None for all. It may bind the free port that the
            kernel chooses (port 0), and with None any.
        listens: Further ports that it may bind.
    """
    version = landlock_version()
    if not version:
        raise OSError(errno.ENOSYS, "the kernel has no Landlock")
    handled = sum(right for first, right in FILE_RIGHTS if version >= first)
    limits_ports = version >= NETWORK_VERSION and ports is not None
    on_ports = BIND_TCP | CONNECT_TCP if limits_ports else 0
    scope = SCOPE_SOCKETS_AND_SIGNALS if version >= SCOPE_VERSION else 0
    # Kernels ignore the zeros of attributes that they do not know.
    attributes = struct.pack("=QQQ", handled, on_ports, scope)
    ruleset = call(libc.syscall, CREATE_RULESET, attributes, len(attributes), 0)

    def add(kind: int, rule: bytes) -> None:
        call(libc.syscall, ADD_RULE, ruleset, kind, rule, 0)

    for paths, rights in ((read, READ), (folders, READ_DIR), (write, WRITE), (devices, DEVICE)):
        for path in paths:
            with suppress(FileNotFoundError, NotADirectoryError):
                beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
                is_folder = stat.S_ISDIR(os.fstat(beneath).st_mode)
                if allowed := rights & handled & (rights if is_folder else ON_FILES):
                    add(RULE_PATH_BENEATH, struct.pack("=Qi", allowed, beneath))
                os.close(beneath)
    if limits_ports:
        for right, allowed_ports in ((BIND_TCP, (0, *listens)), (CONNECT_TCP, ports or ())):
            for port in allowed_ports:
                add(RULE_NET_PORT, struct.pack("=QQ", right, port))
    forbid_new_privileges()
    call(libc.syscall, RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def forbid_new_privileges() -> None:
    """Let no program that this process runs gain privileges, which limits require."""
    call(libc.prctl, PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0)


def drop_capabilities(capabilities: Sequence[int]) -> None:
    """Give up capabilities, which only processes of root have, for good."""
    header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
    data = ctypes.create_string_buffer(24)
    call(libc.capget, header, data)
    kept = ~sum(1 << capability for capability in capabilities)
    # Effective, permitted and inheritable capabilities, 32 bits each, then the higher bits.
    words = enumerate(struct.unpack("=6I", data.raw))
    lowered = (word & kept >> 32 * (index // 3) for index, word in words)
    for capability in capabilities:
        # Programs that it runs get them from here. It fails, as it may, for all but root.
        libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
    call(libc.capset, header, struct.pack("=6I", *lowered))


def call(function: Callable[..., int], *arguments: Any) -> int:
    """Return what a function of the C library returns; raise OSError if the kernel denied it."""
    result = int(function(*arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


# --- filters of system calls ------------------------------------------------------------------

# The machines whose system calls are known (linux/audit.h).
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# The first number of the x32 system calls, a second table of x86_64.
X32 = 0x40000000

# Berkeley Packet Filter (linux/bpf_common.h, linux/seccomp.h): operations and return values.
LOAD, AND, JUMP_EQUAL, JUMP_GREATER_EQUAL, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
# Offsets in struct seccomp_data: the lower half of argument n is at ARGUMENTS + 8 * n.
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
# A mask for all bits of an argument.
WHOLE = 0xFFFFFFFF


# The number of an argument, a mask, and the value that argument & mask has to have.
Condition = tuple[int, int, int]


class Rule(NamedTuple):
    """What happens to a call if all conditions hold; the first rule of a call that holds decides.

    action: ALLOW, or FAIL | errno.
    """

    number: int
    action: int
    conditions: Sequence[Condition] = ()


def filter_program(machine: str, rules: Iterable[Rule], otherwise: int) -> bytes:
    """Return a filter of a machine, as an array of struct sock_filter.

    otherwise: What happens to calls for which no rule holds.
    """
    # Operation, instructions that it skips if it holds and if it does not, value.
    program = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (JUMP_GREATER_EQUAL, 0, 1, X32),
        (RETURN, 0, 0, KILL),
    ]
    for number, action, conditions in rules:
        tests = [(NUMBER, WHOLE, number)]
        tests += [(ARGUMENTS + 8 * argument, mask, value) for argument, mask, value in conditions]
        for left, (offset, mask, value) in zip(range(len(tests), 0, -1), tests, strict=True):
            # A test that fails skips the rest of the rule.
            program += [(LOAD, 0, 0, offset), (AND, 0, 0, mask)]
            program.append((JUMP_EQUAL, 0, 3 * left - 2, value))
        program.append((RETURN, 0, 0, action))
    program.append((RETURN, 0, 0, otherwise))
    return b"".join(struct.pack("=HBBI", *each) for each in program)


def install_filter(program: bytes) -> None:
    """Deny system calls to this process for good."""
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions and their address.
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    forbid_new_privileges()
    call(libc.prctl, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(header))


# Numbers on x86_64 and aarch64 of the calls that jobs may not make, or not in every way.
SOCKET_CALL, TRUNCATE_CALL, IO_URING_CALLS = (41, 198), (76, 45), (425, 426, 427)
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
SOCK_STREAM, SOCK_TYPE_MASK, IPPROTO_TCP = 1, 0xF, 6


def deny_uncovered_calls(has_network: bool, has_unix_sockets: bool) -> None:
    """Deny calls that reach what Landlock does not cover: other sockets than TCP, and io_uring.

    A socket of NETLINK_ROUTE lists the interfaces of the machine, which gloo needs.

    Args:
        has_network: Whether the process may open any socket.
        has_unix_sockets: Whether it may open Unix sockets, as NCCL does between processes.
    """
    machine, denied = platform.machine(), FAIL | errno.EPERM
    column = list(AUDIT_ARCH).index(machine)
    rules = [Rule(number, denied) for number in IO_URING_CALLS]
    # Before version 3, Landlock does not limit truncate.
    if landlock_version() < 3:
        rules.append(Rule(TRUNCATE_CALL[column], denied))
    if not has_network:
        allowed: list[list[Condition]] = [
            [(0, WHOLE, family), (1, SOCK_TYPE_MASK, SOCK_STREAM), (2, WHOLE, protocol)]
            for family in (AF_INET, AF_INET6)
            for protocol in (0, IPPROTO_TCP)
        ]
        allowed.append([(0, WHOLE, AF_NETLINK), (2, WHOLE, 0)])
        if has_unix_sockets:
            allowed.append([(0, WHOLE, AF_UNIX)])
        rules += [Rule(SOCKET_CALL[column], ALLOW, conditions) for conditions in allowed]
        rules.append(Rule(SOCKET_CALL[column], denied))
    install_filter(filter_program(machine, rules, ALLOW))
