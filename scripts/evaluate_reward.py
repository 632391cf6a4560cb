"""Evaluate a reward model on pairs of the evaluation split: accuracy, ties, calibration.

The model scores in fp32. A tie is not counted as correct. longer_wins_accuracy is the accuracy of
choosing the longer response.
"""

from typing import Any

import torch

from snakechat.algorithms.preference import SCORE_ROUNDING, pairwise_loss
from snakechat.data.tokenizers import load_tokenizer
from snakechat.evaluation.held_out_rows import write_pair_metrics
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Scorer, response_scores
from snakechat.training.placed_models import load_frozen, start_evaluation
from snakechat.workflow.job import Job, run
from snakechat.workflow.processes import rank

DTYPE = "fp32"


def main(job: Job[Any]) -> None:
    """Score both responses of each pair and write metrics.json."""
    placement = job.placement
    start_evaluation(placement, DTYPE)
    tokenizer = load_tokenizer(job.inputs["model"])
    pairs = Examples.read(job.inputs["tokens"], "eval", "chosen", "rejected")
    with load_frozen(Scorer, job.inputs["model"], DTYPE, tokenizer, placement, pairs) as model:
        scored = response_scores(model.module, pairs)
    if rank() > 0:
        return
    scores = torch.from_numpy(scored)
    write_pair_metrics(job, pairwise_loss(*scores), scores, SCORE_ROUNDING * scores.abs())


if __name__ == "__main__":
    run(main)
