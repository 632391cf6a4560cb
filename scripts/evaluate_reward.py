"""Evaluate a reward model on pairs of the evaluation split: accuracy, ties, calibration.

The model scores in fp32. A tie is not counted as correct. longer_wins_accuracy is the accuracy of
choosing the longer response.
"""

import json
from typing import Any

import numpy as np
import torch

from snakechat.algorithms.pair_metrics import metrics_by_dataset
from snakechat.algorithms.preference import pairwise_loss
from snakechat.data.ragged_arrays import whole_lengths_path
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import response_scores
from snakechat.training.evaluated_models import loaded_scorer, start_evaluation
from snakechat.training.metric_logs import write_json
from snakechat.workflow.distributed import rank
from snakechat.workflow.job import Job, run

DTYPE = "fp32"


def main(job: Job[Any]) -> None:
    """Score both responses of each pair and write metrics.json."""
    placement = job.placement
    start_evaluation(placement, DTYPE)
    tokenizer = load_tokenizer(job.inputs["model"])
    pairs = Examples.read(job.inputs["tokens"], "eval", "chosen", "rejected")
    with loaded_scorer(job.inputs["model"], DTYPE, tokenizer, placement, pairs) as model:
        scored = response_scores(model.module, pairs, placement.micro_batch_tokens)
    if rank() > 0:
        return
    scores = torch.from_numpy(scored)
    losses = pairwise_loss(scores[0], scores[1])
    stats = json.loads((job.inputs["tokens"] / "stats.json").read_text())
    kept_of = {name: stats["eval"]["kept_of"][name] for name in job.settings.datasets}
    lengths = np.load(whole_lengths_path(job.inputs["tokens"], "eval"), allow_pickle=False)
    metrics = metrics_by_dataset(losses, scores, torch.from_numpy(lengths), kept_of)
    write_json(job.result / "metrics.json", metrics)
    summary = ("accuracy", "ties", "longer_wins_accuracy")
    print(", ".join(f"{name} {metrics[name]:.4f}" for name in summary))


if __name__ == "__main__":
    run(main)
