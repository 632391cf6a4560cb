"""Evaluate the implicit rewards of a DPO model on the evaluation split.

Metrics of pairs: accuracy, margin, loss, calibration. A tie is not counted as correct.
longer_wins_accuracy is the accuracy of choosing the longer response. Metrics of labelled responses
(KTO): the share of good ones, and the AUC of the rewards and of the lengths.

The trained model and the reference model compute in fp32, in whichever dtype they were trained:
some steps of DPO change the margin of a pair by less than the rounding errors of 16 bits.
"""

from typing import Any

from snakechat.algorithms.preference import PreferenceData, reward_rounding
from snakechat.config.settings import has_reference, has_reference_point
from snakechat.evaluation.held_out_rows import sampled_models, write_pair_metrics
from snakechat.workflow.job import Job, run
from snakechat.workflow.processes import rank

DTYPE = "fp32"


def main(job: Job[Any]) -> None:
    """Compute the implicit rewards of both responses of each pair and write metrics.json."""
    settings, data = job.settings, PreferenceData(job.settings, job.inputs, "eval")
    # Names in responses.jsonl, by the job's inputs.
    names = ({"base": "before"} if has_reference(settings.loss) else {}) | {"model": "dpo"}
    for key, model in sampled_models(job, DTYPE, data.rows, names):
        if key == "base":
            data.compute_reference(model.module)
        else:
            losses, rewards = data.evaluate(model.module)
    if rank() == 0:
        rounding = reward_rounding(settings, data.lengths, DTYPE)
        write_pair_metrics(job, losses, rewards, rounding, has_reference_point(settings.loss))


if __name__ == "__main__":
    run(main)
