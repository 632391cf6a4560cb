"""Tokenize pairs for DPO: rows of the reward phase, as DeepSpeed-Chat takes them."""

from snakechat.data.tokenization import encode_responses, write_phase
from snakechat.workflow.job import run


def main(job):
    """Both responses behind the same prompt."""
    write_phase(job, "reward", ("prompt", "chosen", "rejected"), encode_responses)


if __name__ == "__main__":
    run(main)
