"""What the reference of DPO, the model that it starts from, gives to each answer: once, as a file.

PART.npy [2, n] has the log-probability of each row's chosen and rejected answer behind its prompt
(float32, nats).
"""

import numpy as np

from rlhf.batches import Examples
from rlhf.job import run
from rlhf.models import choose_device, load_causal
from rlhf.passes import Policy, answer_logprobs
from rlhf.tokens import load_tokenizer


def main(job):
    """Both answers of all pairs to train and to evaluate on."""
    device = choose_device(job.placement)
    tokenizer = load_tokenizer(job.inputs["model"])
    policy = Policy(load_causal(job.inputs["model"], job.settings.dtype, tokenizer)).to(device)
    for part in ("train", "eval"):
        pairs = Examples.read(job.inputs["tokens"], part, "chosen", "rejected")
        logprobs = answer_logprobs(policy, pairs, job.placement["micro_batch_tokens"])
        np.save(job.result / f"{part}.npy", logprobs.astype(np.float32))
        print(f"{part}: {len(pairs):,} pairs")


if __name__ == "__main__":
    run(main)
