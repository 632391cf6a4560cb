"""Tokenize the rows of a phase: sft, reward, dpo or rlhf, by the rule of the job."""

from snakechat.data.tokenization import TOKENIZATIONS, write_phase
from snakechat.workflow.job import run


def main(job):
    """Write one ragged array per split and text field, and stats.json."""
    write_phase(job, *TOKENIZATIONS[job.spec["rule"]])


if __name__ == "__main__":
    run(main)
