"""What the kernel denies to a process: files and ports by Landlock, system calls by a filter.

Landlock (landlock(7), Linux 5.13) lets a process read, write and connect to what it names, and
nothing else. A filter (seccomp(2)) sees the number of a system call and its arguments, but no
memory that they point to. Both hold for all threads that the calling thread starts later and for
all programs that these run, whichever language reads, and nothing can lift them.

Standard library only: it runs before the first import of a program.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from snakechat.workflow.processes import end_with_parent

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

# Of prctl(2).
PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 22, 2, 24, 38
# With one of these, a process reads the memory and the environment of others: CAP_SYS_PTRACE,
# CAP_SYS_ADMIN and CAP_PERFMON.
READING_CAPABILITIES = (19, 21, 38)
CAPABILITY_VERSION = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 without it, and on unknown machines."""
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

    The rights that the kernel's version of Landlock does not know stay unlimited. Skips paths that
    do not exist. Raises OSError if the kernel has no Landlock, or denies a call.

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
    # Limits require that no program gains privileges.
    call(libc.prctl, PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0)
    call(libc.syscall, RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


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
# A mask for all bits of an argument.
WHOLE = 0xFFFFFFFF


class Rule(NamedTuple):
    """What happens to a call if all conditions hold; its first rule that holds decides."""

    number: int
    # ALLOW, or FAIL | errno.
    action: int
    # The number of an argument, a mask, and the value that argument & mask has to have.
    conditions: Sequence[tuple[int, int, int]] = ()


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
            program += [
                (LOAD, 0, 0, offset),
                (AND, 0, 0, mask),
                (JUMP_EQUAL, 0, 3 * left - 2, value),
            ]
        program.append((RETURN, 0, 0, action))
    program.append((RETURN, 0, 0, otherwise))
    return b"".join(struct.pack("=HBBI", *each) for each in program)


def install_filter(program: bytes) -> None:
    """Deny system calls to this process for good."""
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions and their address.
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    call(libc.prctl, PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0)
    call(libc.prctl, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(header))


# Numbers on x86_64 and aarch64 of the calls that jobs may not make, or not in every way.
SOCKET_CALL, TRUNCATE_CALL, IO_URING_CALLS = (41, 198), (76, 45), (425, 426, 427)
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
SOCK_STREAM, SOCK_TYPE_MASK, IPPROTO_TCP = 1, 0xF, 6


def deny_uncovered_calls(has_network: bool, has_unix_sockets: bool) -> None:
    """Deny calls that reach what Landlock does not cover: other sockets than TCP, and io_uring.

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
        allowed = [
            [(0, WHOLE, family), (1, SOCK_TYPE_MASK, SOCK_STREAM), (2, WHOLE, protocol)]
            for family in (AF_INET, AF_INET6)
            for protocol in (0, IPPROTO_TCP)
        ]
        # NETLINK_ROUTE lists the interfaces of the machine, which gloo needs.
        allowed.append([(0, WHOLE, AF_NETLINK), (2, WHOLE, 0)])
        if has_unix_sockets:
            allowed.append([(0, WHOLE, AF_UNIX)])
        rules += [Rule(SOCKET_CALL[column], ALLOW, conditions) for conditions in allowed]
        rules.append(Rule(SOCKET_CALL[column], denied))
    install_filter(filter_program(machine, rules, ALLOW))


# --- the sandbox of responses -------------------------------------------------------------------

# Linux system calls that the code may make, with their numbers on x86_64 and aarch64 (the kernel's
# syscall tables). None of them starts a process or a program, opens a socket, reaches another
# process or the kernel's keys, makes a file in memory, or changes what Landlock does not cover (the
# mode, the times and the attributes of files). The memory limit holds for all threads together.
ALLOWED = """
read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62,
mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135,
rt_sigreturn 15 139, ioctl 16 29, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66,
access 21 -, pipe 22 -, select 23 -, sched_yield 24 124, mremap 25 216, msync 26 227,
mincore 27 232, madvise 28 233, dup 32 23, dup2 33 -, nanosleep 35 101, getpid 39 172, exit 60 93,
uname 63 160, flock 73 32, fsync 74 82, fdatasync 75 83, ftruncate 77 46, getdents 78 -,
getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -, mkdir 83 -, rmdir 84 -,
creat 85 -, link 86 -, unlink 87 -, symlink 88 -, readlink 89 -, umask 95 166, gettimeofday 96 169,
getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174, getgid 104 176,
geteuid 107 175, getegid 108 177, getppid 110 173, getpgrp 111 -, getgroups 115 158,
sigaltstack 131 132, statfs 137 43, fstatfs 138 44, arch_prctl 158 -, gettid 186 178, time 201 -,
futex 202 98, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22,
eventfd2 290 19, set_tid_address 218 96, restart_syscall 219 128, fadvise64 221 223,
clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94,
openat 257 56, mkdirat 258 34, newfstatat 262 79, unlinkat 263 35, renameat 264 38,
renameat2 316 276, linkat 265 37, symlinkat 266 36, readlinkat 267 78, faccessat 269 48,
faccessat2 439 439, pselect6 270 72, ppoll 271 73, set_robust_list 273 99, dup3 292 24,
pipe2 293 59, getrandom 318 278, membarrier 324 283, statx 332 291, rseq 334 293,
copy_file_range 326 285, sendfile 40 71, close_range 436 436, openat2 437 437, getcpu 309 168
"""
# Calls of a process for itself (process 0), which with another number reach another process.
OF_ITSELF = """
prlimit64 302 261, sched_getaffinity 204 123, sched_setaffinity 203 122, sched_getparam 143 121,
sched_getscheduler 145 120, getpgid 121 155, getsid 124 156
"""
# Commands of fcntl by which the kernel signals a process when a file is ready: F_SETOWN,
# F_SETSIG and F_SETOWN_EX.
FCNTL, SIGNALLING = (72, 25), (8, 10, 15)
# Threads are allowed.
CLONE, CLONE3, CLONE_THREAD = (56, 220), 435, 0x10000


def sandbox_filter(machine: str) -> bytes:
    """Return the filter of a machine, which allows the calls above and new threads alone."""
    denied, column = FAIL | errno.EPERM, list(AUDIT_ARCH).index(machine)
    rules = [
        # Its flags are in memory, where a filter cannot read them: libc uses clone instead.
        Rule(CLONE3, FAIL | errno.ENOSYS),
        Rule(CLONE[column], ALLOW, [(0, CLONE_THREAD, CLONE_THREAD)]),
        *(Rule(FCNTL[column], denied, [(1, WHOLE, value)]) for value in SIGNALLING),
        Rule(FCNTL[column], ALLOW),
        *(Rule(number, ALLOW, [(0, WHOLE, 0)]) for number in numbers_of(OF_ITSELF, machine)),
        *(Rule(number, ALLOW) for number in numbers_of(ALLOWED, machine)),
    ]
    return filter_program(machine, rules, denied)


def numbers_of(calls: str, machine: str) -> list[int]:
    """Return the numbers of system calls on a machine."""
    column = 1 + list(AUDIT_ARCH).index(machine)
    numbers = [call.split()[column] for call in calls.split(",")]
    return [int(number) for number in numbers if number != "-"]


def run_in_sandbox() -> None:
    """Limit this process, then run code and its tests; exit with code 0 if all pass.

    Standard input has a line of JSON: `code`, `tests` (a list), `memory_bytes`, `seconds`, `token`,
    and `read`, the folders that it may read. Writes the token to standard output if all tests pass.
    The working directory is the folder that it may write.
    """
    request = json.loads(sys.stdin.buffer.readline())
    end_with_parent()
    output = os.dup(1)
    for stream in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    for kind, limit in (
        (resource.RLIMIT_AS, request["memory_bytes"]),
        (resource.RLIMIT_CPU, request["seconds"]),
        # Of each file that the code writes. The output of the sandbox is one.
        (resource.RLIMIT_FSIZE, 16 << 20),
        (resource.RLIMIT_CORE, 0),
        # A pipe takes memory of the kernel.
        (resource.RLIMIT_NOFILE, 64),
    ):
        # It cannot be raised again.
        resource.setrlimit(kind, (limit, limit))
    drop_capabilities(range(64))
    restrict(read=request["read"], write=[os.getcwd()], devices=[os.devnull])
    install_filter(sandbox_filter(platform.machine()))
    namespace = {"__name__": "solution"}
    try:
        for text in (request["code"], *request["tests"]):
            exec(compile(text, "solution", "exec"), namespace)
    except BaseException:
        # Also SystemExit: code that ends the program has not passed.
        os._exit(1)
    os.write(output, request["token"].encode())
    os._exit(0)
