"""Reward 1 for a response whose Python code passes the unit tests of its row, 0 for any other.

The code is the response's last block that starts with ```python or ```, or the whole
response. `tests` has a program for each row, or a list of them, such as assert statements: they see
what the code defines. Rows without tests give 0.

Code and tests run in a sandbox: without a network, other files and other processes, with limits for
time and memory (snakechat/evaluation/sandbox.py). This needs Landlock (Linux 5.13); elsewhere the
build stops before its first job.
"""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from snakechat.evaluation.sandbox import check_sandbox, passes

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|$)", re.DOTALL)

check_sandbox()


def score(
    prompts: Sequence[str],
    responses: Sequence[str],
    tests: Sequence[str | Sequence[str] | None],
    seconds: int = 5,
    memory_mb: int = 512,
) -> list[float]:
    """Return one score for each response.

    Args:
        seconds: Limit for the CPU time of a response and its tests.
        memory_mb: Limit for their memory.
    """

    def passed(response: str, programs: str | Sequence[str] | None) -> bool:
        *_, code = [response, *BLOCK.findall(response)]
        programs = [programs] if isinstance(programs, str) else programs
        return passes(code, programs, seconds, memory_mb << 20) if programs else False

    # Each response waits for a process of its own.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return [float(passed) for passed in pool.map(passed, responses, tests)]
