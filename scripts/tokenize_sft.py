"""Tokenize the SFT phase: prompt and chosen of each row, to max_length tokens together."""

from rlhf.job import run
from rlhf.tokens import (
    end_of_prompt,
    is_blank,
    load_tokenizer,
    prompt_ids,
    response_ids,
    write_phase,
)


def main(job):
    """Rows without a prompt or answer are dropped; a long row loses the start of its prompt."""
    tokenizer = load_tokenizer(job.inputs["tokenizer"])
    limit = job.settings.max_length

    def encode(records):
        asked = [row for row in records if not is_blank(row["prompt"])]
        rows = [row for row in asked if not is_blank(row["chosen"])]
        prompts = prompt_ids(tokenizer, [row["prompt"] for row in rows])
        # One token of the prompt stays at least: the first token of an answer needs one before it.
        chosen = [ids[: limit - 1] for ids in response_ids(tokenizer, [r["chosen"] for r in rows])]
        prompts = [
            end_of_prompt(tokenizer, prompt, limit - len(answer))
            for prompt, answer in zip(prompts, chosen, strict=True)
        ]
        return {"prompt": prompts, "chosen": chosen}, {
            "empty prompt": len(records) - len(asked),
            "empty answer": len(asked) - len(rows),
        }

    write_phase(job, "sft", encode, len(tokenizer))


if __name__ == "__main__":
    run(main)
