"""Tables of a training: held-out metrics before and after it, and the means of each epoch."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from snakechat.reporting.labels import CURVES, MOMENTS, PAIRS, TOKEN_LOSSES
from snakechat.reporting.metric_tables import figure_cell
from snakechat.reporting.metric_values import Figure
from snakechat.reporting.page_parts import Table
from snakechat.reporting.translations import translate

Steps = Sequence[Mapping[str, Any]]
# Metrics of pairs that are known before training.
INITIAL = ("accuracy", "loss", "chosen_score", "rejected_score")


def training_tables(
    stage: str,
    settings: Mapping[str, Any],
    metrics: Mapping[str, Any],
    steps: Steps,
    num_rows: int,
) -> list[Table]:
    """Return the tables of a training.

    Args:
        stage: sft, reward, dpo or rlhf.
        settings: Settings of the training.
        metrics: metrics.json of its evaluation.
        steps: The lines of metrics.jsonl.
        num_rows: Number of training rows, or of prompts.
    """
    changes = list(held_out_changes(stage, metrics, steps))
    tables = []
    if changes:
        rows = [
            [translate(label), *(figure_cell(key, Figure(value)) for value in values)]
            for key, label, *values in changes
        ]
        head = ["", *map(translate, MOMENTS.values())]
        tables.append(Table(translate("held-out rows"), head, rows))
    found = {key for line in steps for key in line if not key.endswith("learning_rate")}
    keys = [key for key in CURVES[stage] if key in found]
    batch_size = settings["rollout_batch_size" if stage == "rlhf" else "global_batch_size"]
    epochs = split_epochs(steps, math.ceil(num_rows / batch_size))
    means = [
        [
            str(epoch),
            *(figure_cell(key, Figure(value)) for key in keys for value in [mean_of(lines, key)]),
        ]
        for epoch, lines in enumerate(epochs, 1)
    ]
    head = [translate("epoch"), *(translate(CURVES[stage][key]) for key in keys)]
    return [*tables, Table(translate("Means over the training steps of each epoch"), head, means)]


def held_out_changes(
    stage: str, metrics: Mapping[str, Any], steps: Steps
) -> Iterator[tuple[str, str, float, float]]:
    """Yield key, label and the values before and after training of each metric that has both.

    The results of SFT have its perplexities, with their intervals.
    """
    if stage == "sft":
        for key, label in TOKEN_LOSSES.items():
            before, after = (math.log(metrics[moment][key]) for moment in MOMENTS)
            yield "loss", label, before, after
    elif stage in ("reward", "dpo") and steps and steps[0]["step"] == 0:
        for key in INITIAL:
            yield key, PAIRS[key], steps[0][f"eval_{key}"], metrics[key]


def split_epochs(steps: Steps, steps_per_epoch: int) -> list[Steps]:
    """Return the steps of each epoch, without an evaluation before training (step 0)."""
    trained = [line for line in steps if line["step"] > 0]
    starts = range(0, len(trained), steps_per_epoch)
    return [trained[start : start + steps_per_epoch] for start in starts]


def mean_of(lines: Steps, key: str) -> float:
    """Return the mean of a metric over the steps that have it; NaN if none has.

    Steps count by their target tokens where these are known.
    """
    counted = [(line[key], line.get("tokens", 1)) for line in lines if key in line]
    if not counted:
        return math.nan
    values, weights = zip(*counted, strict=True)
    return statistics.fmean(values, weights)
