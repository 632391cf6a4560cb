"""Sentences about results that readers may misunderstand."""

from collections.abc import Iterator, Mapping
from typing import Any

from snakechat.evaluation.comparisons import initial_model
from snakechat.reporting.formatting import format_metric, format_number
from snakechat.reporting.labels import label_of, model_label
from snakechat.reporting.metric_values import read_figure
from snakechat.reporting.translations import translate

Metrics = Mapping[str, Any]

# The accuracy of guessing which response of a pair is preferred.
GUESSING = 0.5
# Length ranks pairs as well as a model that is at most this much more accurate.
NEAR = 0.02


def remarks_on(stage: str, metrics: Metrics) -> Iterator[str]:
    """Yield remarks on the evaluation of a recipe."""
    if stage == "rlhf":
        yield from rlhf_remarks(metrics)
    elif "accuracy" in metrics:
        yield from pair_remarks(metrics)


def rlhf_remarks(metrics: Metrics) -> Iterator[str]:
    """Yield remarks on the evaluation of an RLHF recipe."""
    initial = initial_model(metrics)
    if direction(metrics, "base_score_difference") > 0:
        yield translate(
            "The base model scores higher ({base}) than {initial} ({trained}). This does not mean"
            " that its responses are better: a reward model ranks responses of the kind that it was"
            " trained on, and its scores of other texts are arbitrary.",
            base=format_number(metrics["base"]["score"]),
            initial=model_label(initial),
            trained=format_number(metrics[initial]["score"]),
        )
    for key in ("judge_score", "success"):
        changes = [direction(metrics, f"{name}_difference") for name in ("score", key)]
        if changes == [1, -1]:
            yield translate(
                "The score rises from {initial} to RLHF, but another metric falls ({metric}): the"
                " policy exploits errors of the reward model.",
                initial=model_label(initial),
                metric=label_of(key),
            )
    counts = [count["normalized"] for count in metrics.get("contamination", {}).values()]
    if any(counts):
        yield translate(
            "{count} of the {total} evaluated prompts also occur in training data: results on them"
            " are optimistic.",
            count=format_number(max(counts)),
            total=format_number(metrics["num_prompts"]),
        )


def pair_remarks(metrics: Metrics) -> Iterator[str]:
    """Yield remarks on the evaluation of a reward model or a DPO model on held-out pairs."""
    datasets = {translate("all pairs"): metrics, **metrics.get("by_dataset", {})}
    for dataset, of in datasets.items():
        accuracy = read_figure(of, "accuracy")
        assert accuracy is not None and accuracy.interval is not None
        if accuracy.interval[0] <= GUESSING <= accuracy.interval[1]:
            yield translate(
                "The accuracy on {pairs} is not distinguishable from guessing: its 95 % interval"
                " contains 50 %.",
                pairs=dataset,
            )
    if metrics["accuracy"] - metrics["longer_wins_accuracy"] < NEAR:
        yield translate(
            "Choosing the longer response is about as accurate ({longer}): the model may have"
            " learned little more than length.",
            longer=format_metric("accuracy", metrics["longer_wins_accuracy"]),
        )


def direction(metrics: Metrics, path: str) -> int:
    """Return the direction of a difference, 0 without one."""
    difference = read_figure(metrics, path)
    return difference.direction if difference else 0
