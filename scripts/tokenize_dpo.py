"""Tokenize pairs for DPO: rows of the reward phase, as DeepSpeed-Chat takes them."""

from rlhf.job import run
from rlhf.tokenizing import encode_answers, write_phase


def main(job):
    """Both answers behind the same prompt."""
    write_phase(job, "reward", ("prompt", "chosen", "rejected"), encode_answers)


if __name__ == "__main__":
    run(main)
