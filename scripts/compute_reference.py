"""Compute the log-probabilities of responses under the reference model of DPO.

The reference is the model that DPO starts from. SPLIT.npy [E, 2, n] contains the log-probability of
the chosen and the rejected response of each pair given its prompt (float32, nats). For KTO,
SPLIT.mismatched.npy [E, 1, n] contains the one of a response to another prompt.

In 16 bits, rows that are packed with other rows have other rounding errors, which may change the
log-probability of a response by a nat. There, E is the number of epochs: each epoch has the
log-probabilities in the batches in which DPO trains on the rows, so that its first loss is exact.
Otherwise E is 1.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from snakechat.data.dialogues import SPLITS
from snakechat.data.ragged_arrays import save_array
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.batching import Examples, epoch_batches
from snakechat.modeling.forward import Policy, response_logprobs
from snakechat.training.placed_models import load_frozen
from snakechat.workflow.job import Job, run
from snakechat.workflow.processes import rank


def main(job: Job[Any]) -> None:
    """Compute the log-probabilities of both splits."""
    settings, folder = job.settings, job.inputs["model"]
    pairs = {
        split: Examples.read(job.inputs["tokens"], split, "chosen", "rejected") for split in SPLITS
    }
    with load_frozen(
        Policy, folder, settings.dtype, load_tokenizer(folder), job.placement, pairs["train"]
    ) as model:
        for split, rows in pairs.items():
            examples = {split: rows}
            if settings.mismatched_max_length is not None:
                examples[f"{split}.mismatched"] = rows.mismatched(
                    settings.mismatched_max_length, split
                )
            for name, each in examples.items():
                logprobs = logprobs_by_epoch(
                    model.module, each, settings.batches if split == "train" else None
                )
                if rank() == 0:
                    save_array(job.result / f"{name}.npy", logprobs)
            if rank() == 0:
                print(f"{split}: {len(rows):,} pairs")


def logprobs_by_epoch(
    policy: Policy, examples: Examples, batches: Mapping[str, Any] | None
) -> np.ndarray:
    """Return the log-probability of each response in each epoch: float32 [E, A, n].

    batches: arguments of epoch_batches after the first; None for one epoch, in any batches.
    """
    if batches is None:
        return response_logprobs(policy, examples)[None].astype(np.float32)
    epochs = epoch_batches(len(examples), **batches)
    logprobs = np.zeros((len(epochs), *examples.response_lengths.shape), np.float32)
    for epoch, epoch_logprobs in zip(epochs, logprobs, strict=True):
        for rows in epoch:
            epoch_logprobs[:, rows] = response_logprobs(policy, examples.select(rows))
    return logprobs


if __name__ == "__main__":
    run(main)
