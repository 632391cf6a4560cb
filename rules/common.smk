# What all rule files stand on.

import os
import re
import sys
from functools import cache
from pathlib import Path

from snakemake.logging import logger

ROOT = Path(workflow.basedir)
sys.path.insert(0, str(ROOT / "scripts"))

from snakechat.workflow.code_digests import code_digests
from snakechat.data.formats import columns_of
from snakechat.workflow.locks import Locked, hold

STAGES = ("sft", "reward", "dpo", "rlhf")
# No blank, no slash, no dot in front: no name leads out of output/ or needs quoting.
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"


wildcard_constraints:
    name=rf"{NAME}(?<!\.json)",
    stage="|".join(STAGES),


# True of every folder that a user asks for: the job before put it there (rules without a command).
logger.addFilter(
    lambda record: "were not present when the DAG was created" not in record.getMessage()
)


def fail(message):
    """Stop planning with one line."""
    sys.exit(f"error: {message}")


# Ctrl-C and a cluster's SIGTERM reach a whole job. The shell waits while a program saves its state,
# and so does tee, by the trap in each command: its last words are shown and kept. set: Snakemake's
# own prefix, which this one takes the place of; a program that fails is a job that fails.
shell.prefix("set -euo pipefail; trap 'exit 143' TERM; ")


# Instead of Snakemake's own lock, which outlives a Snakemake that was killed (profiles/default).
onstart:
    try:
        hold("output/.lock")
    except Locked as other:
        fail(f"{other} is building in {Path.cwd()}: wait for it, or stop it")


def program(rule):
    """Path of the program of a rule, from the working directory."""
    return os.path.relpath(ROOT / f"scripts/{rule}.py")
