"""Tokenize the SFT phase: prompt and chosen of each row, to max_length tokens together."""

from snakechat.data.tokenization import encode_responses, write_phase
from snakechat.workflow.job import run


def main(job):
    """The response that is learnt, behind its prompt."""
    write_phase(job, "sft", ("prompt", "chosen"), encode_responses)


if __name__ == "__main__":
    run(main)
