"""Tokenize the rows of a phase, as the rule of the job requires: SFT, reward, DPO or RLHF."""

from snakechat.data.tokenization import tokenize_phase
from snakechat.workflow.job import Job, run


def main(job: Job) -> None:
    """Write a ragged array of each split and text field, and stats.json."""
    tokenize_phase(job)


if __name__ == "__main__":
    run(main)
