"""Evaluate the implicit rewards of a DPO model on the evaluation split.

Metrics: accuracy, margin, loss, calibration. A tie is not counted as correct. longer_wins_accuracy
is the accuracy of choosing the longer response. A response that is not part of a pair (KTO) is
compared with a reward of 0: accuracy then counts good responses that became likelier and bad ones
that became less likely, and longer_wins_accuracy is the share of good ones.
"""

import json
from typing import Any

from snakechat.algorithms.pair_metrics import metrics_by_dataset
from snakechat.algorithms.preference_data import PreferenceData
from snakechat.data.tokenizers import load_tokenizer
from snakechat.training.evaluated_models import loaded_policy, start_evaluation
from snakechat.training.metrics import write_json
from snakechat.workflow.distributed import rank
from snakechat.workflow.job import Job, run


def main(job: Job[Any]) -> None:
    """Compute the implicit rewards of both responses of each pair and write metrics.json."""
    settings = job.settings
    start_evaluation(job.placement, settings.dtype)
    tokenizer = load_tokenizer(job.inputs["model"])
    data = PreferenceData(settings, job.inputs, "eval")
    with loaded_policy(
        job.inputs["model"], settings.dtype, tokenizer, job.placement, data.rows
    ) as model:
        rewards, losses = data.evaluate(model.module, job.placement["micro_batch_tokens"])
    if rank() > 0:
        return
    stats = json.loads((job.inputs["tokens"] / "stats.json").read_text())
    kept_of = {name: stats["eval"]["kept_of"][name] for name in settings.datasets}
    metrics = metrics_by_dataset(losses, rewards, data.lengths, kept_of)
    write_json(job.result / "metrics.json", metrics)
    summary = ("accuracy", "ties", "longer_wins_accuracy")
    print(", ".join(f"{name} {metrics[name]:.4f}" for name in summary))


if __name__ == "__main__":
    run(main)
