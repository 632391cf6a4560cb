"""Tokenize the SFT phase: prompt and chosen of each row, to max_length tokens together."""

from rlhf.job import run
from rlhf.tokenizing import encode_answers, write_phase


def main(job):
    """The answer that is learnt, behind its prompt."""
    write_phase(job, "sft", ("prompt", "chosen"), encode_answers)


if __name__ == "__main__":
    run(main)
