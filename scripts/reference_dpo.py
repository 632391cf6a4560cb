"""What the reference of DPO, the model that it starts from, gives to each answer: once, as a file.

PART.ANSWER.npy has the log-probability of each row's answer behind its prompt (float32, nats).
"""

import numpy as np

from rlhf.job import run
from rlhf.models import choose_device, load_causal
from rlhf.passes import Policy, response_logprobs
from rlhf.tokens import Ragged, load_tokenizer


def main(job):
    """Both answers of all pairs to train and to evaluate on."""
    device = choose_device(job.placement)
    tokenizer = load_tokenizer(job.inputs["model"])
    model = load_causal(job.inputs["model"], job.settings.dtype, tokenizer)
    policy = Policy(model).to(device).eval()
    for part in ("train", "eval"):
        prompts = Ragged(job.inputs["tokens"], f"{part}.prompt")
        for answer in ("chosen", "rejected"):
            logprobs = response_logprobs(
                policy,
                prompts,
                Ragged(job.inputs["tokens"], f"{part}.{answer}"),
                tokenizer.pad_token_id,
                job.placement["micro_batch_tokens"],
            )
            np.save(job.result / f"{part}.{answer}.npy", logprobs.astype(np.float32))
        print(f"{part}: {len(prompts):,} pairs")


if __name__ == "__main__":
    run(main)
