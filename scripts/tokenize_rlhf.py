"""Tokenize the RLHF phase: the prompts."""

from snakechat.data.tokenization import write_phase
from snakechat.workflow.job import run


def main(job):
    """Prompts of more than max_prompt_length tokens are left out: a cut question is another one."""
    write_phase(job, "rlhf", ("prompt",), encode_prompts)


def encode_prompts(encoder, settings, prompts):
    """Yield (prompt, False) of each row, or the reason why it is left out."""
    for ids in encoder.prompts(prompts):
        yield (ids, False) if len(ids) <= settings.max_prompt_length else "prompt too long"


if __name__ == "__main__":
    run(main)
