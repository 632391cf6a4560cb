"""Compute the log-probabilities of responses under the reference model of DPO.

The reference is the model that DPO starts from. SPLIT.npy [2, n] contains the log-probability of
the chosen and the rejected response of each pair given its prompt (float32, nats). For KTO,
SPLIT.mismatched.npy [1, n] contains that of a response to another prompt.
"""

from typing import Any

import numpy as np

from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, response_logprobs
from snakechat.modeling.loading import load_causal
from snakechat.modeling.models import choose_device
from snakechat.workflow.job import Job, run


def main(job: Job[Any]) -> None:
    """Compute the log-probabilities of both splits."""
    max_tokens, max_length = job.placement["micro_batch_tokens"], job.settings.mismatched_max_length
    device = choose_device(job.placement)
    tokenizer = load_tokenizer(job.inputs["model"])
    policy = Policy(load_causal(job.inputs["model"], job.settings.dtype, tokenizer)).to(device)
    for split in ("train", "eval"):
        pairs = Examples.read(job.inputs["tokens"], split, "chosen", "rejected")
        examples = {split: pairs}
        if max_length is not None:
            examples[f"{split}.mismatched"] = pairs.mismatched(max_length)
        for name, rows in examples.items():
            logprobs = response_logprobs(policy, rows, max_tokens)
            np.save(job.result / f"{name}.npy", logprobs.astype(np.float32))
        print(f"{split}: {len(pairs):,} pairs")


if __name__ == "__main__":
    run(main)
