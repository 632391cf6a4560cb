"""RLHF training of which a process may kill itself, for tests/programs/test_partitioned_rlhf.py.

It is both the launcher and the program that the launcher starts, whose arguments are a file for the
time of its death in step 2, or "-" for none, and those of the program. Inputs that need a whole
build are not checked.
"""

import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import launch  # noqa: E402
import train_rlhf  # noqa: E402
from snakechat.config.rlhf import RlhfSettings  # noqa: E402
from snakechat.workflow import job, publishing  # noqa: E402
from snakechat.workflow.distributed import rank  # noqa: E402

VICTIM = 1


def dying(function, died):
    """Return a function that kills the process in its second call."""
    calls = []

    def replaced(*arguments):
        calls.append(1)
        if len(calls) < 2:
            return function(*arguments)
        Path(died).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    return replaced


def main():
    died = sys.argv.pop(1)
    if died != "-" and rank() == VICTIM:
        train_rlhf.sample_on_all_ranks = dying(train_rlhf.sample_on_all_ranks, died)
    job.run(train_rlhf.main, RlhfSettings)


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        main()
    else:
        publishing.check_code = lambda *_: None
        launch.main()
