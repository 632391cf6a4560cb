"""Tokenize the RLHF phase: the prompts."""

from rlhf.job import run
from rlhf.tokens import is_blank, load_tokenizer, prompt_ids, write_phase


def main(job):
    """Prompts of more than max_prompt_length tokens are left out: a cut question is another one."""
    tokenizer = load_tokenizer(job.inputs["tokenizer"])

    def encode(records):
        texts = [row["prompt"] for row in records if not is_blank(row["prompt"])]
        prompts = prompt_ids(tokenizer, texts)
        kept = [ids for ids in prompts if len(ids) <= job.settings.max_prompt_length]
        return {"prompt": kept}, {
            "empty prompt": len(records) - len(texts),
            "prompt too long": len(prompts) - len(kept),
        }

    write_phase(job, "rlhf", encode, len(tokenizer))


if __name__ == "__main__":
    run(main)
