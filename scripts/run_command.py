"""Train by the command of a recipe in place of our trainer.

It fills the folder of the result, which is then loaded as what the stage trains
(scripts/check_model.py).
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

from snakechat.workflow.commands import run_command
from snakechat.workflow.distributed import rank
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job, run


def main(job: Job[Any]) -> None:
    """Run the command, and check what it wrote.

    Raises:
        InputError: As run_command, or the command wrote nothing.
    """
    run_command(job, job.result)
    # Of several nodes, the first one completes the result.
    if rank() > 0:
        return
    if not any(job.result.iterdir()):
        raise InputError(f"{job.target}: the command wrote nothing to {{output}}")
    kind = "classifier" if job.spec["rule"] == "train_reward" else "causal"
    folders = [job.result, job.inputs.get("actor") or job.inputs["model"], job.log_folder]
    program = Path(__file__).with_name("check_model.py")
    if subprocess.run([sys.executable, program, kind, job.target, *folders]).returncode:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
