"""Evaluate the implicit rewards of a DPO model on pairs of the evaluation split.

Metrics: accuracy, margin, loss, calibration. A tie is not counted as correct. longer_wins_accuracy
is the accuracy of choosing the longer response.
"""

import json
from typing import Any

import numpy as np
import torch

from snakechat.algorithms.pair_metrics import metrics_by_dataset
from snakechat.algorithms.preference import preference_losses
from snakechat.config.dpo import has_reference
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, response_logprobs
from snakechat.modeling.loading import load_causal
from snakechat.modeling.models import choose_device
from snakechat.training.metrics import write_json
from snakechat.workflow.job import Job, run


def main(job: Job[Any]) -> None:
    """Compute the implicit rewards of both responses of each pair and write metrics.json."""
    settings = job.settings
    device = choose_device(job.placement)
    tokenizer = load_tokenizer(job.inputs["model"])
    policy = Policy(load_causal(job.inputs["model"], settings.dtype, tokenizer)).to(device)
    pairs = Examples.read(job.inputs["tokens"], "eval", "chosen", "rejected")
    logprobs = torch.from_numpy(
        response_logprobs(policy, pairs, job.placement["micro_batch_tokens"])
    )
    lengths = torch.from_numpy(pairs.response_lengths)
    reference = None
    if has_reference(settings.loss):
        reference = torch.from_numpy(np.load(job.inputs["reference"] / "eval.npy")).double()
    rewards, losses = preference_losses(settings, logprobs, reference, lengths)
    stats = json.loads((job.inputs["tokens"] / "stats.json").read_text())
    kept_of = {name: stats["eval"]["kept_of"][name] for name in settings.datasets}
    metrics = metrics_by_dataset(losses, rewards, lengths, kept_of)
    write_json(job.result / "metrics.json", metrics)
    summary = ("accuracy", "ties", "longer_wins_accuracy")
    print(", ".join(f"{name} {metrics[name]:.4f}" for name in summary))


if __name__ == "__main__":
    run(main)
