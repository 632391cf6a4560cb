"""Comparisons of models without some datasets: names, metrics, differences and remarks."""

import pytest

from compare_runs import difference_tables, remarks, result_rows
from snakechat.reporting.ablation import (
    ablation_remarks,
    common_metrics,
    contribution_section,
    dataset_metrics,
    is_ablation,
)
from snakechat.reporting.comparison import Group, Run, group_names
from snakechat.reporting.setting_differences import UpstreamJob
from snakechat.reporting.translations import translator

LABELS = {"accuracy": "accuracy", "rlhf.score": "score", "rlhf.judge_score": "score by the judge"}


def english(text, **values):
    return text.format(**values)


def group(left_out, accuracies, reward_model="one"):
    """A group with an accuracy for each seed."""
    upstream = {"train_reward": [UpstreamJob(f"output/reward/{reward_model}", reward_model, {})]}
    runs = [
        Run(
            name=f"mine-{seed}",
            seed=seed,
            settings={},
            upstream=upstream,
            swept={"leave_out": left_out, "seed": seed},
            steps=[],
            metrics={
                "accuracy": value,
                "rlhf": {"score": value, "judge_score": value},
                "by_dataset": {"a": {"accuracy": value}, "b.c": {"accuracy": 1 - value}},
            },
        )
        for seed, value in enumerate(accuracies)
    ]
    return Group(runs)


@pytest.fixture
def groups():
    all_data = group([], [0.9, 0.91, 0.92])
    return [all_data, group(["a"], [0.5, 0.51, 0.52]), group(["a", "b.c"], [0.9, 0.91, 0.93])]


def test_groups_are_named_after_what_is_left_out(groups):
    assert group_names(groups) == ["all data", "without a", "without a, b.c"]
    assert group_names(groups, translator("zh")) == ["全部数据", "去掉 a", "去掉 a, b.c"]
    assert is_ablation(groups)
    assert not is_ablation(groups[1:])
    recipe = Group([run._replace(swept={}) for run in groups[1].runs])
    assert not is_ablation([groups[0], recipe])


def test_metrics_of_each_dataset_have_differences_too(groups):
    metrics = dataset_metrics(groups, "reward", english)
    assert metrics == {
        "by_dataset.a.accuracy": "accuracy, rows of a",
        "by_dataset.b.c.accuracy": "accuracy, rows of b.c",
    }
    assert groups[1].difference(groups[0], "by_dataset.b.c.accuracy").value == pytest.approx(0.4)
    assert dataset_metrics(groups, "sft", english) == {}


def test_scores_of_different_reward_models_have_no_differences(groups):
    assert common_metrics(groups, LABELS) == LABELS
    groups[1] = group(["a"], [0.5, 0.51, 0.52], "two")
    assert [*common_metrics(groups, LABELS)] == ["accuracy", "rlhf.judge_score"]
    [table] = difference_tables(groups, LABELS, english)
    assert [row[0] for row in table.rows] == ["accuracy", "score by the judge"]
    assert table.head == ["", "without a (3 seeds)", "without a, b.c (3 seeds)"]
    # Nor is one of them the best.
    rows = {row[0]: row[1:] for row in result_rows(groups, LABELS, english)}
    assert {cell.tone for cell in rows["score"]} == {""}
    assert "best" in {cell.tone for cell in rows["score by the judge"]}
    section = contribution_section(groups, LABELS, [table], english)
    assert [panel.title for panel in section.panels] == ["accuracy", "score by the judge"]


def test_remarks_say_what_a_dataset_contributes(groups):
    labels = {"accuracy": "accuracy"}
    sentences = [*ablation_remarks(groups, labels, english)]
    assert [sentence.partition(",")[0] for sentence in sentences] == ["Without a", "Without a"]
    assert "accuracy \N{MINUS SIGN}40.0\N{NO-BREAK SPACE}pp. The 95 %" in sentences[0]
    assert sentences[1].startswith("Without a, b.c, the model does not differ measurably")
    # They replace those of other comparisons.
    assert [*remarks(groups, labels, english)] == []
    groups[1] = group(["a"], [0.5, 0.51, 0.52], "two")
    *_, last = ablation_remarks(groups, LABELS, english)
    assert "Scores of different reward models cannot be compared" in last
    # A single seed has no differences.
    single = [Group(each.runs[:1]) for each in groups]
    assert [*ablation_remarks(single, labels, english)] == []
