"""Evaluate the implicit rewards of a DPO model on the evaluation split.

Metrics: accuracy, margin, loss, calibration. A tie is not counted as correct. longer_wins_accuracy
is the accuracy of choosing the longer response. A response that is not part of a pair (KTO) is
compared with a reward of 0: accuracy then counts good responses that became likelier and bad ones
that became less likely, and longer_wins_accuracy is the share of good ones.

The trained model and the reference model compute in fp32, in whichever dtype they were trained:
some steps of DPO change the margin of a pair by less than the rounding errors of 16 bits.
"""

from typing import Any

import torch
from torch import Tensor

from snakechat.algorithms.pair_metrics import write_metrics
from snakechat.algorithms.preference import (
    kto_reference_point,
    preference_losses,
    response_rewards,
)
from snakechat.config.dpo import has_reference, has_reference_point
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import response_logprobs
from snakechat.training.evaluated_models import loaded_policy, start_evaluation
from snakechat.workflow.distributed import rank
from snakechat.workflow.job import Job, run

DTYPE = "fp32"


def main(job: Job[Any]) -> None:
    """Compute the implicit rewards of both responses of each pair and write metrics.json."""
    settings, placement = job.settings, job.placement
    start_evaluation(placement, DTYPE)
    tokenizer = load_tokenizer(job.inputs["model"])
    pairs = Examples.read(job.inputs["tokens"], "eval", "chosen", "rejected")
    examples = {"pairs": pairs}
    if has_reference_point(settings.loss):
        examples["mismatched"] = pairs.mismatched(settings.max_length, "eval")

    def evaluate(model: str) -> dict[str, Tensor]:
        """Return the log-probabilities [A, n] of each of the examples under an input's model."""
        with loaded_policy(job.inputs[model], DTYPE, tokenizer, placement, pairs) as loaded:
            return {
                name: torch.from_numpy(
                    response_logprobs(loaded.module, rows, placement.micro_batch_tokens)
                )
                for name, rows in examples.items()
            }

    logprobs = evaluate("model")
    reference = evaluate("base") if has_reference(settings.loss) else {}
    if rank() > 0:
        return
    lengths = {name: torch.from_numpy(rows.response_lengths) for name, rows in examples.items()}
    reference_point = None
    if "mismatched" in examples:
        others = (each["mismatched"] for each in (logprobs, reference, lengths))
        reference_point = kto_reference_point(response_rewards(settings, *others))
    rewards, losses = preference_losses(
        settings, logprobs["pairs"], reference.get("pairs"), lengths["pairs"], reference_point
    )
    write_metrics(job, losses, rewards)


if __name__ == "__main__":
    run(main)
