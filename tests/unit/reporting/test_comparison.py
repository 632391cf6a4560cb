"""Comparisons by hand: groups of seeds, their names, results, differences, rows of the data."""

import math

import pytest

from compare_runs import (
    difference_tables,
    group_labels,
    remarks,
    result_rows,
    seed_tables,
    setting_rows,
)
from snakechat.reporting.comparison import (
    Group,
    Run,
    difference_rows,
    group_by_settings,
    group_names,
    long_rows,
)
from snakechat.reporting.setting_differences import UpstreamJob


def a_run(name, seed, steps=(), metrics=None, swept=None, upstream=None, **settings):
    return Run(name, seed, settings, upstream or {}, swept or {}, list(steps), metrics or {})


def seeds_of(name, metric, values):
    """A group with a value of a metric for each seed."""
    return Group([a_run(name, seed, metrics={metric: value}) for seed, value in enumerate(values)])


def english(text, **values):
    return text.format(**values)


def texts_of(rows):
    """The texts of the cells of rows, with their tone, and spaces and signs of a typewriter."""
    return [
        [
            cell
            if cell is None or isinstance(cell, str)
            else " ".join(filter(None, cell)).replace("\xa0", " ").replace("\u2212", "-")
            for cell in row
        ]
        for row in rows
    ]


def test_runs_that_differ_only_in_their_seed_are_one_group():
    runs = [a_run("a", 1, kl=1), a_run("b", 1, kl=2), a_run("a2", 2, kl=1), a_run("a3", 3, kl=1)]
    groups = group_by_settings(runs)
    assert [[run.name for run in group.runs] for group in groups] == [["a", "a2", "a3"], ["b"]]
    assert group_labels(groups, english) == ["a (3 seeds)", "b"]


def test_runs_with_other_upstream_settings_are_other_groups():
    upstream = [{"train_sft": [UpstreamJob("p", "a", {"epochs": n})]} for n in (1, 2, 1)]
    groups = group_by_settings(
        [a_run(f"r{n}", n, upstream=jobs) for n, jobs in enumerate(upstream)]
    )
    assert [[run.seed for run in group.runs] for group in groups] == [[0, 2], [1]]


def swept(beta, seed, **more):
    values = {"beta": beta, "seed": seed, **more}
    name = "-".join(["mine", *(f"{key}-{value}" for key, value in values.items())])
    return a_run(name, seed, swept=values, beta=beta)


def test_columns_of_a_sweep_have_the_settings_that_differ_as_their_names():
    groups = group_by_settings([swept(beta, seed) for beta in (0.1, 0.5) for seed in (1, 2)])
    assert group_names(groups) == ["beta 0.1", "beta 0.5"]
    # A setting with one value is in no name.
    groups = group_by_settings([swept(beta, 1, loss="ipo") for beta in (0.1, 0.5)])
    assert group_names(groups) == ["beta 0.1", "beta 0.5"]


def test_recipes_that_users_wrote_keep_their_names():
    groups = group_by_settings([a_run("tiny", 1, beta=0.3), swept(0.1, 1), swept(0.5, 1)])
    assert group_names(groups) == ["tiny", "beta 0.1", "beta 0.5"]
    # Its settings are those of a run of the sweep.
    groups = group_by_settings([swept(0.1, 1), a_run("tiny", 2, beta=0.1), swept(0.5, 1)])
    assert group_names(groups) == ["tiny", "beta 0.5"]


def test_a_sweep_over_seeds_has_the_name_of_its_recipes_without_the_seed():
    runs = [a_run(f"mine-seed-{seed}", seed, swept={"seed": seed}) for seed in (1, 2)]
    assert group_names([Group(runs)]) == ["mine"]
    assert group_names([Group(runs[:1])]) == ["mine-seed-1"]


def test_groups_have_different_names():
    # Two sweeps over the same values, of recipes that differ elsewhere.
    runs = [
        a_run(f"{sweep}-beta-1", 1, swept={"beta": 1}, beta=1, of=sweep) for sweep in ("a", "b")
    ]
    other = a_run("a-beta-2", 1, swept={"beta": 2}, beta=2, of="a")
    groups = group_by_settings([*runs, other])
    assert group_names(groups) == ["a-beta-1", "b-beta-1", "a-beta-2"]


def test_curves_of_seeds_are_mean_and_range_at_the_steps_that_all_have():
    runs = [
        a_run("a", 1, [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 4.0}]),
        a_run("b", 2, [{"step": 1, "loss": 3.0}]),
    ]
    assert Group(runs).points("loss") == [(1, 2.0, 1.0, 3.0)]
    assert Group(runs[:1]).points("loss") == [(1, 1.0, 1.0, 1.0), (2, 4.0, 4.0, 4.0)]


def test_only_settings_that_differ_have_a_row():
    groups = [
        Group([a_run("a", 1, kl=1, same=[1], only="x"), a_run("a2", 2, kl=1, same=[1], only="x")]),
        Group([a_run("b", 1, kl=2, same=[1])]),
    ]
    assert setting_rows(groups, english) == [
        ["kl", "1", "2"],
        ["only", "x", ""],
        ["seed", "1, 2", "1"],
    ]


METRICS = {
    "sft": {"score": 1.0},
    "rlhf": {"score": 2.0, "success": 0.5, "length": 10.0},
    "intervals_95": {"rlhf": {"score": [1.5, 2.5]}},
    "wins": {"rlhf": {"sft": {"score": {"mean": 0.75, "interval_95": [0.5, 1.0], "longer": 1}}}},
}
MORE = {**METRICS, "rlhf": {"score": 4.0, "success": 0.75, "length": 10.0}}
LABELS = {
    "rlhf.score": "score",
    "rlhf.success": "correct",
    "rlhf.length": "length",
    "wins.rlhf.sft.score": "wins",
    "rlhf.judge_score": "nowhere",
}


def test_a_result_has_its_own_interval_or_that_of_its_seeds():
    groups = [
        Group([a_run("a", 1, metrics=METRICS)]),
        Group([a_run("b", 1, metrics=METRICS), a_run("b2", 2, metrics=MORE)]),
        Group([a_run("c", 1, metrics={"rlhf": {"length": 3.0}})]),
    ]
    # 2 and 4: mean 3, standard deviation 1.414, divided by the root of 2, times 12.706. 0.5 and
    # 0.75: mean 0.625, logit 0.5108, plus and minus 12.706 * 0.125 / (0.625 * 0.375) = 6.777.
    assert texts_of(result_rows(groups, LABELS, english)) == [
        ["score", "2.00 [1.50, 2.50] n = 1", "3.00 [-9.71, 15.7] n = 2 best", None],
        ["correct", "50.0 %", "62.5 % [0.2 %, 99.9 %] n = 2 best", None],
        ["length", "10.0", "10.0 [10.0, 10.0] n = 2", "3.00"],
        ["wins", "75.0 % [50.0 %, 100.0 %] n = 1", "75.0 % [75.0 %, 75.0 %] n = 2", None],
    ]


def test_each_seed_has_a_row_of_results():
    several = Group([a_run("b", 1, metrics=METRICS), a_run("b2", 2, metrics=MORE)])
    groups = [Group([a_run("a", 1, metrics=METRICS)]), several]
    [table] = seed_tables(groups, LABELS, english)
    assert (table.caption, table.head) == (
        "b (2 seeds)",
        ["seed", "score", "correct", "length", "wins"],
    )
    assert texts_of(table.rows) == [
        ["1", "2.00", "50.0 %", "10.0", "75.0 %"],
        ["2", "4.00", "75.0 %", "10.0", "75.0 %"],
    ]


def test_the_data_have_a_row_of_each_mean_and_of_each_seed():
    several = Group([a_run("b", 1, metrics=METRICS), a_run("b2", 2, metrics=MORE)])
    mean, first, second = long_rows([several], ["rlhf.score", "rlhf.judge_score"])
    assert (mean["group"], mean["seed"], mean["metric"], mean["n"]) == ("b", None, "rlhf.score", 2)
    assert (mean["value"], mean["low"]) == (3, pytest.approx(3 - 12.706, abs=1e-3))
    assert first == {**mean, "seed": 1, "value": 2, "low": 1.5, "high": 2.5, "n": 1}
    assert (second["seed"], second["value"], second["n"]) == (2, 4, 1)


def test_differences_from_the_first_column_have_welchs_interval_and_a_mark():
    groups = [seeds_of("a", "loss", [1, 2, 3]), seeds_of("b", "loss", [11, 12, 13])]
    groups += [seeds_of("c", "loss", [2, 3, 4]), seeds_of("d", "loss", [9])]
    # Both standard errors are 1 / sqrt(3): that of the difference is sqrt(2/3), with t of four
    # degrees of freedom 2.776.
    half = 2.7764 * math.sqrt(2 / 3)
    far, near = difference_rows(groups, ["loss"])
    assert far["group"] == "b" and near["group"] == "c"
    assert (far["value"], far["n"], far["excludes_zero"]) == (10, 3, True)
    assert [far["low"], far["high"]] == pytest.approx([10 - half, 10 + half], abs=1e-3)
    assert (near["value"], near["excludes_zero"]) == (1, False)
    # A single seed has no column.
    [table] = difference_tables(groups, {"loss": "loss"}, english)
    assert table.head == ["", "b (3 seeds)", "c (3 seeds)"]
    assert texts_of(table.rows) == [
        ["loss", "+10.0 [+7.73, +12.3] n = 3 worse", "+1.00 [-1.27, +3.27] n = 3"]
    ]
    [first, second] = remarks(groups[:3], {"loss": "loss"}, english)
    assert first.startswith("b differs from a: loss +10.0.")
    assert second.startswith("c and a do not differ measurably")


def test_single_seeds_have_no_differences():
    groups = [seeds_of("a", "accuracy", [0.5]), seeds_of("b", "accuracy", [0.9])]
    assert difference_rows(groups, ["accuracy"]) == []
    assert difference_tables(groups, {"accuracy": "accuracy"}, english) == []
    [remark] = remarks(groups, {"accuracy": "accuracy"}, english)
    assert remark.startswith("A single seed does not")


def test_differences_of_fractions_are_between_minus_one_and_one():
    groups = [seeds_of("a", "accuracy", [0.1, 0.3]), seeds_of("b", "accuracy", [0.6, 0.9])]
    [row] = difference_rows(groups, ["accuracy"])
    assert row["low"] >= -1 and row["high"] == 1


def test_equal_values_of_both_have_a_difference_without_an_interval():
    groups = [seeds_of("a", "ties", [0, 0]), seeds_of("b", "ties", [0.5, 0.5])]
    [row] = difference_rows(groups, ["ties"])
    assert (row["value"], row["low"], row["excludes_zero"]) == (0.5, None, False)
