"""The program inside the sandbox: it limits itself, then runs code and its tests.

Reads one line of JSON from standard input: `code`, `tests` (a list), `memory_bytes`, `seconds`,
`token`, and `read`, the folders that it may read. Writes the token to standard output if all tests
pass. Its working directory is the folder that it may write. Standard library only.
"""

import errno
import json
import os
import platform
import resource
import sys

from snakechat.workflow.kernel_limits import (
    ALL_CAPABILITIES,
    ALLOW,
    AUDIT_ARCH,
    FAIL,
    WHOLE,
    Rule,
    drop_capabilities,
    filter_program,
    install_filter,
    restrict,
)
from snakechat.workflow.processes import end_with_parent

# Files that the code may write, in bytes each. The output of the sandbox is one of them.
MAX_FILE_BYTES = 16 << 20
# A pipe takes memory of the kernel.
MAX_OPEN_FILES = 64

# Linux system calls that the code may make, with their numbers on x86_64 and aarch64 (the kernel's
# syscall tables). None of them starts a process or a program, opens a socket, reaches another
# process or the kernel's keys, makes a file in memory, or changes what Landlock does not cover (the
# mode, the times and the attributes of files): the memory limit is that of all.
ALLOWED = """
read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -,
lseek 8 62, mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134,
rt_sigprocmask 14 135, rt_sigreturn 15 139, ioctl 16 29, pread64 17 67, pwrite64 18 68,
readv 19 65, writev 20 66, access 21 -, pipe 22 -, select 23 -, sched_yield 24 124,
mremap 25 216, msync 26 227, mincore 27 232, madvise 28 233, dup 32 23, dup2 33 -,
nanosleep 35 101, getpid 39 172, exit 60 93, uname 63 160, flock 73 32, fsync 74 82,
fdatasync 75 83, ftruncate 77 46, getdents 78 -, getdents64 217 61, getcwd 79 17,
chdir 80 49, fchdir 81 50, rename 82 -, mkdir 83 -, rmdir 84 -, creat 85 -, link 86 -,
unlink 87 -, symlink 88 -, readlink 89 -, umask 95 166,
gettimeofday 96 169, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153,
getuid 102 174, getgid 104 176, geteuid 107 175, getegid 108 177, getppid 110 173, getpgrp 111 -,
getgroups 115 158, sigaltstack 131 132, statfs 137 43,
fstatfs 138 44, arch_prctl 158 -, gettid 186 178, time 201 -,
futex 202 98, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -,
epoll_pwait 281 22, eventfd2 290 19, set_tid_address 218 96, restart_syscall 219 128,
fadvise64 221 223, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115,
exit_group 231 94, openat 257 56, mkdirat 258 34, newfstatat 262 79, unlinkat 263 35,
renameat 264 38, renameat2 316 276, linkat 265 37, symlinkat 266 36, readlinkat 267 78,
faccessat 269 48, faccessat2 439 439, pselect6 270 72, ppoll 271 73,
set_robust_list 273 99, dup3 292 24, pipe2 293 59,
getrandom 318 278, membarrier 324 283, statx 332 291, rseq 334 293,
copy_file_range 326 285, sendfile 40 71, close_range 436 436, openat2 437 437, getcpu 309 168
"""
# Calls of a process for itself (process 0), which with another number reach another process.
OF_ITSELF = """
prlimit64 302 261, sched_getaffinity 204 123, sched_setaffinity 203 122, sched_getparam 143 121,
sched_getscheduler 145 120, getpgid 121 155, getsid 124 156
"""
# Commands of fcntl (72, 25) by which the kernel signals a process when a file is ready: F_SETOWN,
# F_SETSIG and F_SETOWN_EX.
FCNTL = {"x86_64": 72, "aarch64": 25}
SIGNALLING = (8, 10, 15)
# Threads are allowed.
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
CLONE_THREAD = 0x10000


def numbers_of(calls: str, machine: str) -> list[int]:
    """Return the numbers of system calls on a machine."""
    column = 1 + list(AUDIT_ARCH).index(machine)
    numbers = [call.split()[column] for call in calls.split(",")]
    return [int(number) for number in numbers if number != "-"]


def sandbox_filter(machine: str) -> bytes:
    """Return the filter of a machine, which allows the calls above and new threads alone."""
    denied = FAIL | errno.EPERM
    return filter_program(
        machine,
        [
            # Its flags are in memory, where a filter cannot read them: libc uses clone instead.
            Rule(CLONE3, FAIL | errno.ENOSYS),
            Rule(CLONE[machine], ALLOW, [(0, CLONE_THREAD, CLONE_THREAD)]),
            *(Rule(FCNTL[machine], denied, [(1, WHOLE, value)]) for value in SIGNALLING),
            Rule(FCNTL[machine], ALLOW),
            *(Rule(each, ALLOW, [(0, WHOLE, 0)]) for each in numbers_of(OF_ITSELF, machine)),
            *(Rule(number, ALLOW) for number in numbers_of(ALLOWED, machine)),
        ],
        otherwise=denied,
    )


def main() -> None:
    """Run the code and its tests; exit with code 0 if all pass."""
    request = json.loads(sys.stdin.buffer.readline())
    end_with_parent()
    output = os.dup(1)
    for stream in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    for kind, limit in (
        (resource.RLIMIT_AS, request["memory_bytes"]),
        (resource.RLIMIT_CPU, request["seconds"]),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    ):
        # It cannot be raised again.
        resource.setrlimit(kind, (limit, limit))
    drop_capabilities(ALL_CAPABILITIES)
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
