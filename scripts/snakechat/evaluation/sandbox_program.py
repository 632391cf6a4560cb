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

# Files that the code may write, in bytes each. The output of the sandbox is one of them.
MAX_FILE_BYTES = 16 << 20
# A pipe takes memory of the kernel.
MAX_OPEN_FILES = 64

# Linux system calls that the code may make, with their numbers on x86_64 and aarch64 (the kernel's
# syscall tables). None of them starts a process or a program, opens a socket, reaches another
# process or the kernel's keys, or makes a file in memory: the memory limit is that of all.
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED = """
read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -,
lseek 8 62, mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134,
rt_sigprocmask 14 135, rt_sigreturn 15 139, ioctl 16 29, pread64 17 67, pwrite64 18 68,
readv 19 65, writev 20 66, access 21 -, pipe 22 -, select 23 -, sched_yield 24 124,
mremap 25 216, msync 26 227, mincore 27 232, madvise 28 233, dup 32 23, dup2 33 -,
nanosleep 35 101, getpid 39 172, exit 60 93, uname 63 160, fcntl 72 25, flock 73 32, fsync 74 82,
fdatasync 75 83, truncate 76 45, ftruncate 77 46, getdents 78 -, getdents64 217 61, getcwd 79 17,
chdir 80 49, fchdir 81 50, rename 82 -, mkdir 83 -, rmdir 84 -, creat 85 -, link 86 -,
unlink 87 -, symlink 88 -, readlink 89 -, chmod 90 -, fchmod 91 52, umask 95 166,
gettimeofday 96 169, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153,
getuid 102 174, getgid 104 176, geteuid 107 175, getegid 108 177, getppid 110 173, getpgrp 111 -,
getpgid 121 155, getsid 124 156, getgroups 115 158, sigaltstack 131 132, statfs 137 43,
fstatfs 138 44, arch_prctl 158 -, gettid 186 178, tgkill 234 131, kill 62 129, time 201 -,
futex 202 98, sched_getaffinity 204 123, sched_setaffinity 203 122, sched_getparam 143 121,
sched_getscheduler 145 120, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -,
epoll_pwait 281 22, eventfd2 290 19, set_tid_address 218 96, restart_syscall 219 128,
fadvise64 221 223, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115,
exit_group 231 94, openat 257 56, mkdirat 258 34, newfstatat 262 79, unlinkat 263 35,
renameat 264 38, renameat2 316 276, linkat 265 37, symlinkat 266 36, readlinkat 267 78,
fchmodat 268 53, faccessat 269 48, faccessat2 439 439, pselect6 270 72, ppoll 271 73,
set_robust_list 273 99, get_robust_list 274 100, utimensat 280 88, dup3 292 24, pipe2 293 59,
prlimit64 302 261, getrandom 318 278, membarrier 324 283, statx 332 291, rseq 334 293,
copy_file_range 326 285, sendfile 40 71, close_range 436 436, openat2 437 437, getcpu 309 168
"""
# Threads are allowed.
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
CLONE_THREAD = 0x10000
# The first number of the x32 system calls, a second table of x86_64.
X32 = 0x40000000

# Berkeley Packet Filter (linux/bpf_common.h, linux/seccomp.h): operations and return values.
LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
# Offsets in struct seccomp_data.
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2


def allowed_calls(machine: str) -> list[int]:
    """Return the numbers of the system calls that the code may make on a machine."""
    column = 1 + list(AUDIT_ARCH).index(machine)
    numbers = [call.split()[column] for call in ALLOWED.split(",")]
    return [int(number) for number in numbers if number != "-"]


def filter_program(machine: str) -> bytes:
    """Return the seccomp filter of a machine, as an array of struct sock_filter.

    It allows the calls of ALLOWED and new threads; all others fail.
    """

    def instruction(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", operation, if_true, if_false, value)

    def return_if(number: int, action: int) -> list[bytes]:
        equal = instruction(JUMP_EQUAL, number, if_false=1)
        return [equal, instruction(RETURN, action)]

    program = [
        instruction(LOAD, ARCHITECTURE),
        instruction(JUMP_EQUAL, AUDIT_ARCH[machine], if_true=1),
        instruction(RETURN, KILL),
        instruction(LOAD, NUMBER),
        instruction(JUMP_GREATER_EQUAL, X32, if_false=1),
        instruction(RETURN, KILL),
        # Its flags are in memory, where a filter cannot read them: libc uses clone instead.
        *return_if(CLONE3, FAIL | errno.ENOSYS),
    ]
    for number in allowed_calls(machine):
        program += return_if(number, ALLOW)
    program += [
        instruction(JUMP_EQUAL, CLONE[machine], if_false=3),
        instruction(LOAD, FIRST_ARGUMENT),
        instruction(JUMP_SET, CLONE_THREAD, if_false=1),
        instruction(RETURN, ALLOW),
        instruction(RETURN, FAIL | errno.EPERM),
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
    limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
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
