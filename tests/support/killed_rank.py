"""RLHF training of which a process kills itself, for tests/programs/test_partitioned_rlhf.py.

Arguments: the phase in which it dies (or none), a file for the time of its death, and those of the
program. Inputs that need a whole build are not checked.
"""

import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import train_rlhf  # noqa: E402
from snakechat.config.rlhf import RlhfSettings  # noqa: E402
from snakechat.training import checkpointing, deepspeed_engine  # noqa: E402
from snakechat.workflow import job  # noqa: E402
from snakechat.workflow.distributed import rank  # noqa: E402

VICTIM = 1
# The function that is called in each phase, and the call that does not return. The runs after the
# first two resume after step 1 of 2.
PHASES = {
    "load": (deepspeed_engine, "partition_weights", 2),
    "sample": (train_rlhf, "sample_on_all_ranks", 2),
    "train": (deepspeed_engine.DeepSpeedEngine, "step", 1),
    "checkpoint": (checkpointing, "save_file", 1),
    "save": (train_rlhf, "save_model", 1),
}


def dying(function, call, died):
    """Return a function that kills the process in the middle of a call."""
    calls = 0

    def replaced(*arguments, **named):
        nonlocal calls
        calls += 1
        if calls < call:
            return function(*arguments, **named)
        if function.__name__ == "save_model":
            # After the third weight.
            *others, gather = arguments
            return function(*others, dying(gather, 3, died))
        died.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    return replaced


def main():
    phase, died = sys.argv[1:3]
    del sys.argv[1:3]
    if phase in PHASES and rank() == VICTIM:
        owner, name, call = PHASES[phase]
        setattr(owner, name, dying(getattr(owner, name), call, Path(died)))
    job.check_code = lambda *_: None
    job.run(train_rlhf.main, RlhfSettings)


if __name__ == "__main__":
    main()
