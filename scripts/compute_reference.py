"""What the reference of DPO, the model that it starts from, gives to each response: once, as a file.

PART.npy [2, n] has the log-probability of each row's chosen and rejected response behind its prompt
(float32, nats).
"""

import numpy as np

from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, response_logprobs
from snakechat.modeling.models import choose_device, load_causal
from snakechat.workflow.job import run


def main(job):
    """Both responses of all pairs to train and to evaluate on."""
    device = choose_device(job.placement)
    tokenizer = load_tokenizer(job.inputs["model"])
    policy = Policy(load_causal(job.inputs["model"], job.settings.dtype, tokenizer)).to(device)
    for part in ("train", "eval"):
        pairs = Examples.read(job.inputs["tokens"], part, "chosen", "rejected")
        logprobs = response_logprobs(policy, pairs, job.placement["micro_batch_tokens"])
        np.save(job.result / f"{part}.npy", logprobs.astype(np.float32))
        print(f"{part}: {len(pairs):,} pairs")


if __name__ == "__main__":
    run(main)
