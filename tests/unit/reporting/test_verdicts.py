"""Verdicts by hand: figures, bounds, and differences from a baseline."""

import json
import math

import pytest

from snakechat.config.expectations import BASELINE
from snakechat.reporting.figures import Figure, read_figure
from snakechat.reporting.gates import _update_card
from snakechat.reporting.verdicts import Verdict, describe, difference_of, judge

METRICS = {
    "accuracy": 0.6,
    "pairs": 100,
    "loss": 0.5,
    "by_dataset": {"a.b": {"accuracy": 0.9, "pairs": 10}, "a": {"accuracy": 0.3, "pairs": 90}},
}
PERPLEXITY = {
    "after": {"perplexity": 3.0},
    "intervals_95": {"after": {"perplexity": [2.6, 3.4]}},
}
RESPONSES = {
    "rlhf": {"length": 5.0, "score": 1.0, "judge_score": 2.0},
    "intervals_95": {"rlhf": {"length": [4, 6], "score": [0.5, 1.5], "judge_score": [1.5, 2.5]}},
    "wins": {"rlhf": {"sft": {"score": {"mean": 0.6, "interval_95": [0.52, 0.68]}}}},
}


@pytest.mark.parametrize(
    ("metrics", "path", "expected"),
    [
        (METRICS, "accuracy", Figure(0.6, None)),
        # Names of datasets have dots.
        (METRICS, "by_dataset.a.b.accuracy", Figure(0.9, None)),
        (METRICS, "by_dataset.a.accuracy", Figure(0.3, None)),
        (METRICS, "by_dataset.a", None),
        (METRICS, "accurac", None),
        (RESPONSES, "rlhf.length", Figure(5.0, [4, 6])),
        (RESPONSES, "wins.rlhf.sft.score", Figure(0.6, [0.52, 0.68])),
        (RESPONSES, "wins.rlhf.sft", None),
    ],
)
def test_figures_are_numbers_with_their_intervals(metrics, path, expected):
    assert read_figure(metrics, path) == expected


def evaluation(folder, metrics, inputs=(), **settings):
    """Write an evaluation."""
    folder.mkdir()
    spec = {"name": "mine", "settings": settings}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    (folder / "manifest.json").write_text(json.dumps({"spec": spec, "inputs": dict(inputs)}))
    return folder


@pytest.mark.parametrize(
    ("stage", "metrics", "path", "bounds", "met"),
    [
        ("reward", METRICS, "accuracy", {"min": 0.6}, True),
        ("reward", METRICS, "accuracy", {"min": 0.61}, False),
        ("reward", METRICS, "loss", {"max": 0.5}, True),
        ("reward", METRICS, "loss", {"max": 0.49}, False),
        # Wilson's interval of 60 of 100 is 0.502 to 0.691.
        ("reward", METRICS, "accuracy", {"min": 0.5, "by": "lower_bound"}, True),
        ("reward", METRICS, "accuracy", {"min": 0.51, "by": "lower_bound"}, False),
        ("reward", METRICS, "accuracy", {"max": 0.69, "by": "upper_bound"}, False),
        # That of 9 of 10 is 0.596 to 0.982.
        ("reward", METRICS, "by_dataset.a.b.accuracy", {"min": 0.6, "by": "lower_bound"}, False),
        ("sft", PERPLEXITY, "after.perplexity", {"max": 3.5, "by": "upper_bound"}, True),
        ("sft", PERPLEXITY, "after.perplexity", {"max": 3.3, "by": "upper_bound"}, False),
        # Of a single row there is no interval, and a value nevertheless.
        ("sft", {"after": {"perplexity": 3.0}}, "after.perplexity", {"max": 3.5}, True),
        ("rlhf", RESPONSES, "wins.rlhf.sft.score", {"min": 0.52, "by": "lower_bound"}, True),
        ("rlhf", RESPONSES, "rlhf.length", {"max": 5.5, "by": "upper_bound"}, False),
        ("rlhf", {"rlhf": {"length": math.nan}}, "rlhf.length", {"max": 5}, False),
        # No value meets no expectation.
        ("rlhf", {}, "rlhf.length", {"max": 5}, False),
    ],
)
def test_bounds(tmp_path, stage, metrics, path, bounds, met):
    folder = evaluation(tmp_path / "eval", metrics)
    [verdict] = judge(stage, {"expect": {path: bounds}}, folder, None)
    assert verdict.met is met
    assert path in describe(verdict)


def test_both_bounds_of_a_metric_are_judged(tmp_path):
    folder = evaluation(tmp_path / "eval", METRICS)
    expected = {"expect": {"loss": {"min": 0.6, "max": 1}}}
    verdicts = judge("reward", expected, folder, None)
    assert [(each.kind, each.met) for each in verdicts] == [("min", False), ("max", True)]
    assert describe(verdicts[0]) == "loss is 0.5, expected at least 0.6"


def test_interval_of_a_difference():
    """Newcombe 1998, table II, example (a): 56/70 and 48/80, method 10: 0.0524 to 0.3339."""
    from snakechat.reporting.intervals import proportion_interval

    figures = [Figure(n / of, proportion_interval(n / of, of)) for n, of in ((56, 70), (48, 80))]
    difference = difference_of(*figures)
    assert difference.value == pytest.approx(0.2)
    assert difference.interval == pytest.approx([0.0524, 0.3339], abs=1e-4)


def baseline_of(**figures):
    return {BASELINE: 1, "stage": "reward", "recipe": "old", "figures": figures, "measures": {}}


@pytest.mark.parametrize(
    ("accuracy", "met"),
    [
        ([0.6, [0.5, 0.7]], True),
        ([0.1, [0.05, 0.2]], True),
        # Higher, but no more than chance.
        ([0.7, [0.6, 0.8]], True),
        ([0.95, [0.9, 0.98]], False),
    ],
)
def test_a_recipe_is_worse_if_the_interval_of_the_difference_excludes_0(tmp_path, accuracy, met):
    folder = evaluation(tmp_path / "eval", METRICS)
    baseline = baseline_of(accuracy=accuracy)
    expected = {"not_worse_than": "old.json", "baseline": baseline}
    [verdict] = judge("reward", expected, folder, None)
    assert (verdict.metric, verdict.met, verdict.baseline) == ("accuracy", met, "old.json")


def test_lower_is_better_for_some_metrics(tmp_path):
    metrics = {"rlhf": {"repetition": 0.5}, "intervals_95": {"rlhf": {"repetition": [0.4, 0.6]}}}
    now = evaluation(tmp_path / "now", metrics)
    metrics = {"rlhf": {"repetition": 0.1}, "intervals_95": {"rlhf": {"repetition": [0.0, 0.2]}}}
    old = evaluation(tmp_path / "old", metrics)
    assert [v.met for v in judge("rlhf", {"not_worse_than": "old"}, now, old)] == [False]
    assert [v.met for v in judge("rlhf", {"not_worse_than": "old"}, old, now)] == [True]


def test_scores_of_another_reward_model_are_not_compared(tmp_path):
    same = {"reward": "digest", "judge": "digest", "sft": "another"}
    now = evaluation(tmp_path / "now", RESPONSES, same, reward="tiny", judge="judge")

    def compared(**changes):
        folder = tmp_path / "-".join(changes) if changes else tmp_path / "old"
        old = evaluation(folder, RESPONSES, {**same, **changes}, reward="tiny", judge="judge")
        return [verdict.metric for verdict in judge("rlhf", {"not_worse_than": "x"}, now, old)]

    assert compared() == ["rlhf.score", "rlhf.judge_score", "wins.rlhf.sft.score"]
    assert compared(reward="other") == ["rlhf.judge_score"]
    assert compared(judge="other") == ["rlhf.score", "wins.rlhf.sft.score"]


def test_verdicts_in_a_model_card_replace_earlier_ones(tmp_path):
    card = tmp_path / "mine/README.md"
    card.parent.mkdir()
    before = "# mine\n\nIt is.\n\n## Sources\n\n- data\n\n## Accepted changes\n\n- one\n"
    card.write_text(before)
    missed = Verdict("loss", Figure(0.5, None), "max", 0.4, met=False)
    for verdict, mark in ((missed, "**missed**"), (missed._replace(met=True), "met")):
        _update_card(card, [verdict])
        line = f"## Expectations\n\n- {mark}: loss is 0.5, expected at most 0.4\n\n## Sources\n"
        assert card.read_text() == before.replace("## Sources\n", line)
    _update_card(card, [])
    assert card.read_text() == before
    # A card that a person shortened.
    card.write_text("# mine\n")
    _update_card(card, [missed])
    assert card.read_text().startswith("# mine\n## Expectations\n")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    _update_card(tmp_path / "none/README.md", [missed])
