"""Evaluate the implicit rewards of a DPO model on the evaluation split.

Metrics: accuracy, margin, loss, calibration. A tie is not counted as correct. longer_wins_accuracy
is the accuracy of choosing the longer response. A response that is not part of a pair (KTO) is
compared with a reward of 0: accuracy then counts good responses that became likelier and bad ones
that became less likely, and longer_wins_accuracy is the share of good ones.

The trained model and the reference model compute in fp32, in whichever dtype they were trained:
some steps of DPO change the margin of a pair by less than the rounding errors of 16 bits.
margin_noise is the largest rounding error of a margin that is found on some pairs; within_noise is
the share of pairs whose margin is not larger.
"""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snakechat.algorithms.pair_metrics import metrics_by_dataset
from snakechat.algorithms.preference import (
    kto_reference_point,
    preference_losses,
    response_rewards,
)
from snakechat.config.dpo import has_reference, has_reference_point
from snakechat.data.ragged_arrays import whole_lengths_path
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import response_logprobs
from snakechat.training.evaluated_models import loaded_policy, start_evaluation
from snakechat.training.metric_logs import write_json
from snakechat.workflow.distributed import rank
from snakechat.workflow.job import Job, run

DTYPE = "fp32"
# Pairs that are evaluated a second time, each in a micro-batch by itself.
NUM_PROBES = 32


def main(job: Job[Any]) -> None:
    """Compute the implicit rewards of both responses of each pair and write metrics.json."""
    settings, placement = job.settings, job.placement
    start_evaluation(placement, DTYPE)
    tokenizer = load_tokenizer(job.inputs["model"])
    pairs = Examples.read(job.inputs["tokens"], "eval", "chosen", "rejected")
    probes = np.unique(np.linspace(0, len(pairs) - 1, NUM_PROBES).astype(int))
    examples = {"pairs": pairs, "probes": pairs.select(probes)}
    if has_reference_point(settings.loss):
        examples["mismatched"] = pairs.mismatched(settings.max_length, "eval")

    def evaluate(model: str) -> dict[str, Tensor]:
        """Return the log-probabilities [A, n] of each of the examples under an input's model."""
        with loaded_policy(job.inputs[model], DTYPE, tokenizer, placement, pairs) as loaded:
            return {
                name: torch.from_numpy(
                    response_logprobs(
                        loaded.module,
                        rows,
                        # A limit of 1 token gives each pair a micro-batch by itself.
                        1 if name == "probes" else placement.micro_batch_tokens,
                    )
                )
                for name, rows in examples.items()
            }

    logprobs = evaluate("model")
    reference = evaluate("base") if has_reference(settings.loss) else {}
    if rank() > 0:
        return
    lengths = {name: torch.from_numpy(rows.response_lengths) for name, rows in examples.items()}

    def rewards_of(name: str) -> Tensor:
        return response_rewards(settings, logprobs[name], reference.get(name), lengths[name])

    reference_point = None
    if "mismatched" in examples:
        reference_point = kto_reference_point(rewards_of("mismatched"))
    rewards, losses = preference_losses(
        settings, logprobs["pairs"], reference.get("pairs"), lengths["pairs"], reference_point
    )
    margins, (chosen, rejected) = rewards[0] - rewards[1], rewards_of("probes")
    noise = (chosen - rejected - margins[probes]).abs().max()
    stats = json.loads((job.inputs["tokens"] / "stats.json").read_text())
    kept_of = {name: stats["eval"]["kept_of"][name] for name in settings.datasets}
    whole_lengths = np.load(whole_lengths_path(job.inputs["tokens"], "eval"), allow_pickle=False)
    metrics = metrics_by_dataset(losses, rewards, torch.from_numpy(whole_lengths), kept_of)
    metrics["margin_noise"] = noise.item()
    metrics["within_noise"] = (margins.abs() <= noise).double().mean().item()
    write_json(job.result / "metrics.json", metrics)
    summary = ("accuracy", "ties", "within_noise", "longer_wins_accuracy")
    print(", ".join(f"{name} {metrics[name]:.4f}" for name in summary))


if __name__ == "__main__":
    run(main)
