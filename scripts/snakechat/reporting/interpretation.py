"""Sentences about results that readers may misunderstand, or that call for caution."""

from collections.abc import Iterator, Mapping
from typing import Any

from snakechat.evaluation.comparisons import initial_model
from snakechat.reporting.formatting import format_share, format_significant
from snakechat.reporting.intervals import proportion_interval
from snakechat.reporting.labels import MODELS, N_
from snakechat.reporting.translations import Translate

Metrics = Mapping[str, Any]

# From these values on, a result is worth a remark.
FEW_ENDED, LONGER, FAR, SHARED, NEAR = 0.9, 1.5, 20.0, 0.2, 0.02
# The accuracy of guessing which response of a pair is preferred.
GUESSING = 0.5


def rlhf_remarks(metrics: Metrics, translate: Translate) -> Iterator[str]:
    """Yield remarks on the evaluation of an RLHF recipe."""
    initial = initial_model(metrics)
    name = translate(MODELS[initial])
    yield from base_remarks(metrics, initial, translate)
    yield from exploitation_remarks(metrics, name, translate)
    before, after = metrics[initial], metrics["rlhf"]
    if before["length"] and after["length"] > LONGER * before["length"]:
        yield translate(
            "RLHF responses are {factor} times as long as those of {initial}. Reward models often"
            " prefer long responses: compare the win rates by length.",
            factor=format_significant(after["length"] / before["length"]),
            initial=name,
        )
    if after["ended_by_eos"] < FEW_ENDED:
        yield translate(
            "Only {share} of the RLHF responses end by themselves; the others are cut at the"
            " maximum length. Increase max_response_length, or check that the training data end"
            " with the end of a turn.",
            share=format_share(after["ended_by_eos"]),
        )
    kl = after.get(f"kl_to_{initial}")
    if kl is not None and kl > FAR:
        yield translate(
            "The policy is {kl} nats per response away from {initial}. At such distances, scores of"
            " the reward model say little: a larger kl_coef keeps the policy closer.",
            kl=format_significant(kl),
            initial=name,
        )
    yield from contamination_remarks(metrics, translate)


def base_remarks(metrics: Metrics, initial: str, translate: Translate) -> Iterator[str]:
    """Yield a remark if the base model has a higher score than the model that was trained on it.

    The 95 % interval of the difference has to exclude 0.
    """
    difference = metrics.get("base_score_difference")
    if difference is None or difference["interval_95"][0] <= 0:
        return
    base, trained = metrics["base"], metrics[initial]
    yield translate(
        "The base model scores higher ({base}) than {initial} ({trained}). This does not mean that"
        " its responses are better: a reward model ranks responses of the kind that it was trained"
        " on, and its scores of other texts are arbitrary.",
        base=format_significant(base["score"]),
        initial=translate(MODELS[initial]),
        trained=format_significant(trained["score"]),
    )
    if base["ended_by_eos"] < FEW_ENDED:
        yield translate(
            "Only {share} of the base model's responses end by themselves, so the reward model"
            " scores texts that no training pair resembles. Compare such a model by a metric that"
            " does not come from the reward model.",
            share=format_share(base["ended_by_eos"]),
        )


def exploitation_remarks(metrics: Metrics, initial: str, translate: Translate) -> Iterator[str]:
    """Yield a remark if the score rises while an independent metric falls."""
    gain = metrics.get("score_difference")
    if gain is None or gain["interval_95"][0] <= 0:
        return
    names = {"judge_score": N_("score by the judge"), "success": N_("share of correct responses")}
    for key, label in names.items():
        other = metrics.get(f"{key}_difference")
        if other and other["interval_95"][1] < 0:
            yield translate(
                "The score rises from {initial} to RLHF, but the {metric} falls: the policy"
                " exploits errors of the reward model.",
                initial=initial,
                metric=translate(label),
            )


def contamination_remarks(metrics: Metrics, translate: Translate) -> Iterator[str]:
    """Yield a remark if prompts of the evaluation occur in training data."""
    counts = [count["normalized"] for count in metrics.get("contamination", {}).values()]
    if most := max(counts, default=0):
        yield translate(
            "{count} of the {total} evaluated prompts also occur in training data: results on them"
            " are optimistic.",
            count=format_significant(most),
            total=format_significant(metrics["num_prompts"]),
        )


def pair_remarks(metrics: Metrics, translate: Translate) -> Iterator[str]:
    """Yield remarks on the evaluation of a reward model or a DPO model on held-out pairs."""
    for dataset, of in {None: metrics, **metrics.get("by_dataset", {})}.items():
        interval = proportion_interval(of["accuracy"], of["pairs"])
        if interval[0] <= GUESSING <= interval[1]:
            low, high = map(format_share, interval)
            yield translate(
                "The accuracy on {pairs} is not distinguishable from guessing: its 95 % interval,"
                " {low} to {high}, contains 50 %.",
                pairs=dataset or translate("all pairs"),
                low=low,
                high=high,
            )
    longer = metrics["longer_wins_accuracy"]
    if metrics["accuracy"] - longer < NEAR:
        yield translate(
            "Choosing the longer response is about as accurate ({longer}): the model may have"
            " learned little more than length.",
            longer=format_share(longer),
        )
    if metrics["ties"] > NEAR:
        yield translate(
            "{ties} of the pairs are ties, which do not count as correct. Responses that are equal"
            " after truncation have equal scores: max_length may be too small.",
            ties=format_share(metrics["ties"]),
        )
    if metrics.get("within_noise", 0) > NEAR:
        yield translate(
            "The margins of {share} of the pairs are not larger than their rounding error in fp32:"
            " which response they prefer is chance. The training has changed the model too little.",
            share=format_share(metrics["within_noise"]),
        )


def data_remarks(shares: Mapping[str, tuple[float, float]], translate: Translate) -> Iterator[str]:
    """Yield remarks on prompts that rows share.

    shares: by dataset, the share of rows with a prompt of another row, and of another phase.
    """
    for dataset, (repeated, shared) in shares.items():
        if repeated > SHARED:
            yield translate(
                "{dataset}: {share} of the rows repeat a prompt of an earlier row. Their responses"
                " may differ; the number of independent prompts is smaller than that of rows.",
                dataset=dataset,
                share=format_share(repeated),
            )
        if shared > SHARED:
            yield translate(
                "{dataset}: {share} of the training rows have a prompt that also occurs in another"
                " phase. The reward model then has seen the prompts on which RLHF trains, and its"
                " scores during training are optimistic. Held-out prompts are not affected. The"
                " setting split: {{by: prompt}} keeps all rows of a prompt in one phase.",
                dataset=dataset,
                share=format_share(shared),
            )
