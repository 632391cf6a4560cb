"""Tokenize the reward phase: prompt, chosen and rejected of each row."""

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
    """Rows with no prompt, an empty answer or equal answers teach nothing and are dropped.

    Both answers stand behind the same prompt, cut at its start so that the longer one fits into
    max_length.
    """
    tokenizer = load_tokenizer(job.inputs["tokenizer"])
    limit = job.settings.max_length

    def encode(records):
        asked = [r for r in records if not is_blank(r["prompt"])]
        full = [r for r in asked if not is_blank(r["chosen"]) and not is_blank(r["rejected"])]
        rows = [r for r in full if r["chosen"].strip() != r["rejected"].strip()]
        prompts = prompt_ids(tokenizer, [row["prompt"] for row in rows])
        chosen = [ids[: limit - 1] for ids in response_ids(tokenizer, [r["chosen"] for r in rows])]
        rejected = [
            ids[: limit - 1] for ids in response_ids(tokenizer, [r["rejected"] for r in rows])
        ]
        longest = [max(len(c), len(r)) for c, r in zip(chosen, rejected, strict=True)]
        prompts = [
            end_of_prompt(tokenizer, prompt, limit - answer)
            for prompt, answer in zip(prompts, longest, strict=True)
        ]
        fields = {"prompt": prompts, "chosen": chosen, "rejected": rejected}
        # Answers that differ only behind the cut are equal to the model.
        differ = [n for n in range(len(rows)) if chosen[n] != rejected[n]]
        kept = {name: [ids[n] for n in differ] for name, ids in fields.items()}
        return kept, {
            "empty prompt": len(records) - len(asked),
            "empty answer": len(asked) - len(full),
            "equal answers": len(full) - len(differ),
        }

    write_phase(job, "reward", encode, len(tokenizer))


if __name__ == "__main__":
    run(main)
