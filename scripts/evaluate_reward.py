"""Evaluate a reward model on pairs of the evaluation split: accuracy, ties, calibration.

The model scores in fp32. A tie is not counted as correct. longer_wins_accuracy is the accuracy of
choosing the longer response.
"""

from typing import Any

from snakechat.algorithms.preference import SCORE_ROUNDING, pairwise_loss
from snakechat.evaluation.held_out_rows import reward_scores, write_pair_metrics
from snakechat.modeling.batching import Examples
from snakechat.workflow.job import Job, run
from snakechat.workflow.processes import rank


def main(job: Job[Any]) -> None:
    """Score both responses of each pair and write metrics.json."""
    pairs = Examples.read(job.inputs["tokens"], "eval", "chosen", "rejected")
    scores = reward_scores(job, "model", pairs)
    if rank() == 0:
        write_pair_metrics(job, pairwise_loss(*scores), scores, SCORE_ROUNDING * scores.abs())


if __name__ == "__main__":
    run(main)
