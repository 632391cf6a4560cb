"""Filters of system calls: what a process may ask of the kernel (seccomp(2), Linux).

A filter holds for the process and all programs that it runs, and cannot be lifted. It sees the
number of a call and its arguments, but no memory that they point to.

Standard library only: it runs before the first import of a program.
"""

import ctypes
import errno
import platform
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from snakechat.workflow.landlock import check, forbid_new_privileges, landlock_version, libc

# The machines whose system calls are known (linux/audit.h).
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# The first number of the x32 system calls, a second table of x86_64.
X32 = 0x40000000

# Berkeley Packet Filter (linux/bpf_common.h, linux/seccomp.h): operations and return values.
LOAD, AND, JUMP, JUMP_EQUAL, JUMP_GREATER_EQUAL, RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
# Offsets in struct seccomp_data: the lower half of argument n is at ARGUMENTS + 8 * n.
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2


class Condition(NamedTuple):
    """A test of an argument of a call: whether argument & mask is one of values."""

    argument: int
    values: Sequence[int]
    mask: int = 0xFFFFFFFF

    def instructions(self, length: int) -> list[bytes]:
        """Return the instructions that skip the next `length` ones unless the condition holds."""
        start = [_instruction(LOAD, ARGUMENTS + 8 * self.argument), _instruction(AND, self.mask)]
        lefts = range(len(self.values), 0, -1)
        tests = [_instruction(JUMP_EQUAL, *each) for each in zip(self.values, lefts, strict=True)]
        return [*start, *tests, _instruction(JUMP, length)]


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
    program = [
        _instruction(LOAD, ARCHITECTURE),
        _instruction(JUMP_EQUAL, AUDIT_ARCH[machine], if_true=1),
        _instruction(RETURN, KILL),
        _instruction(LOAD, NUMBER),
        _instruction(JUMP_GREATER_EQUAL, X32, if_false=1),
        _instruction(RETURN, KILL),
    ]
    for rule in rules:
        # Each condition jumps to the end of the rule, where the number is loaded again.
        body: list[bytes] = [_instruction(RETURN, rule.action)]
        for condition in reversed(rule.conditions):
            body = [*condition.instructions(len(body)), *body]
        if rule.conditions:
            body.append(_instruction(LOAD, NUMBER))
        program += [_instruction(JUMP_EQUAL, rule.number, if_false=len(body)), *body]
    program.append(_instruction(RETURN, otherwise))
    return b"".join(program)


def _instruction(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)


def install_filter(program: bytes) -> None:
    """Deny system calls to this process for good.

    Raises:
        OSError: The kernel rejects the filter.
    """
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions and their address.
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    forbid_new_privileges()
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(header)))


# Numbers on x86_64 and aarch64 of the calls that jobs may not make, or not in every way.
SOCKET, TRUNCATE, IO_URING = (41, 198), (76, 45), (425, 426, 427)
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
SOCK_STREAM, SOCK_TYPE_MASK, IPPROTO_TCP = 1, 0xF, 6


def deny_uncovered_calls(has_network: bool, has_unix_sockets: bool) -> None:
    """Deny calls that reach what Landlock does not cover: other sockets than TCP, and io_uring.

    A socket of NETLINK_ROUTE lists the interfaces of the machine, which gloo needs.

    Args:
        has_network: Whether the process may open any socket.
        has_unix_sockets: Whether it may open Unix sockets, as NCCL does between processes.

    Raises:
        OSError: The kernel rejects the filter.
    """
    column = list(AUDIT_ARCH).index(platform.machine())
    denied = FAIL | errno.EPERM
    rules = [Rule(number, denied) for number in IO_URING]
    # Before version 3, Landlock does not limit truncate.
    if landlock_version() < 3:
        rules.append(Rule(TRUNCATE[column], denied))
    if not has_network:
        is_tcp = [
            Condition(0, (AF_INET, AF_INET6)),
            Condition(1, (SOCK_STREAM,), SOCK_TYPE_MASK),
            Condition(2, (0, IPPROTO_TCP)),
        ]
        rules += [
            Rule(SOCKET[column], ALLOW, is_tcp),
            Rule(SOCKET[column], ALLOW, [Condition(0, (AF_NETLINK,)), Condition(2, (0,))]),
        ]
        if has_unix_sockets:
            rules.append(Rule(SOCKET[column], ALLOW, [Condition(0, (AF_UNIX,))]))
        rules.append(Rule(SOCKET[column], denied))
    install_filter(filter_program(platform.machine(), rules, ALLOW))
