"""Metrics of the rows of the evaluation split: of all, and of each dataset."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from snakechat.data.ragged_arrays import Ragged, read_statistics
from snakechat.evaluation.intervals import clusters_of
from snakechat.training.metric_logs import write_json
from snakechat.workflow.job import Job


def write_metrics(
    job: Job[Any], metrics_of: Callable[[np.ndarray, slice], dict[str, Any]]
) -> dict[str, Any]:
    """Write metrics.json of the rows, and return it.

    metrics_of: Returns metrics from the cluster of each row [n] (rows with equal prompts share one)
        and the rows that count.
    """
    prompts = Ragged(job.inputs["tokens"], "eval.prompt")
    clusters = clusters_of(tuple(prompts[row]) for row in range(len(prompts)))
    # A single dataset has no name here.
    names, numbers = job.settings.datasets or [""], read_statistics(job.inputs["tokens"], "eval")
    rows_of = dict(zip(names, numbers["kept_of"], strict=True))
    metrics = metrics_by_dataset(partial(metrics_of, clusters), rows_of)
    write_json(job.result / "metrics.json", metrics)
    return metrics


def metrics_by_dataset(
    metrics_of: Callable[[slice], dict[str, Any]], rows_of: Mapping[str, int]
) -> dict[str, Any]:
    """Return the metrics of all rows; of each dataset under by_dataset, if several have rows."""
    metrics = metrics_of(slice(None))
    names = [name for name, number in rows_of.items() if number]
    if len(names) > 1:
        bounds = pairwise(accumulate((rows_of[name] for name in names), initial=0))
        metrics["by_dataset"] = {
            name: metrics_of(slice(*of)) for name, of in zip(names, bounds, strict=True)
        }
    return metrics
