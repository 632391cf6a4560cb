"""Comparisons by hand: groups of seeds, their names, results, differences, rows of the data."""

import math

import pytest

from snakechat.pages.comparison import (
    Group,
    comparable_settings,
    group_by_settings,
    result_tables,
    setting_differences,
    setting_table,
)
from snakechat.pages.jobs import Training
from snakechat.pages.metrics import result_paths
from support.pages import text_of


def a_run(name, seed, metrics=(), **compared):
    """A training with settings besides its seed; without any, a training log."""
    settings = {} if seed is None else {"seed": seed}
    return Training("sft", name, settings, {}, [], dict(metrics), {}, compared=compared)


def seeds_of(name, metric, values):
    """A group with a value of a metric for each seed."""
    runs = [a_run(name, seed, metrics={metric: value}) for seed, value in enumerate(values)]
    return Group(name, runs)


def texts_of(table):
    """The texts of the cells of a table."""
    return [[*map(text_of, row)] for row in table.rows]


def test_runs_that_differ_only_in_their_seed_are_one_group():
    runs = [a_run("a", 1, kl=1), a_run("b", 1, kl=2), a_run("a2", 2, kl=1), a_run("a3", 3, kl=1)]
    groups = group_by_settings(runs)
    assert [[run.name for run in group.runs] for group in groups] == [["a", "a2", "a3"], ["b"]]
    assert [group.name for group in groups] == ["a", "b"]


def test_names_of_groups_have_no_seed_and_are_distinct():
    def named(*runs):
        return [group.name for group in group_by_settings(runs)]

    seeds = [a_run(f"mine-beta-{b}-seed-{s}", s, beta=b) for b in (1, 2) for s in (1, 2)]
    assert named(*seeds) == ["mine-beta-1", "mine-beta-2"]
    assert named(*seeds[1:]) == ["mine-beta-1-seed-2", "mine-beta-2"]
    assert named(*seeds, a_run("mine-beta-1", 1, beta=3))[0] == "mine-beta-1-seed-1"


def test_columns_of_a_sweep_name_the_settings_that_differ():
    runs = [
        a_run(f"mine-{rate}-{rank}", 1, learning_rate=rate, lora_rank=rank, epochs=1)
        for rate in (0.001, 0.01)
        for rank in (4, 8)
    ]
    names = [group.name for group in group_by_settings(runs, by_differences=True)]
    assert names[0] == "learning_rate 0.001, lora_rank 4" and len(set(names)) == 4
    placed = [a_run(f"a-{stage}", 1, **{"placement: zero_stage": stage}) for stage in (0, 2)]
    names = [group.name for group in group_by_settings(placed, by_differences=True)]
    assert names == ["zero_stage 0", "zero_stage 2"]
    seeds = [a_run(f"mine-seed-{seed}", seed, epochs=1) for seed in (1, 2)]
    assert [group.name for group in group_by_settings(seeds, by_differences=True)] == ["mine"]


def test_curves_of_seeds_have_the_steps_that_all_of_them_have():
    # The second seed stopped early.
    losses = ([1.0, 4.0], [3.0])
    runs = [
        a_run("a", 1)._replace(steps=[{"step": n, "loss": loss} for n, loss in enumerate(of, 1)])
        for of in losses
    ]
    assert Group("a", runs).points("loss") == [(1, 1.0), (1, 3.0)]
    assert Group("a", runs[:1]).points("loss") == [(1, 1.0), (2, 4.0)]


METRICS = {
    "sft": {"score": 1.0},
    "rlhf": {"score": 2.0, "success": 0.5, "length": 10.0},
    "intervals_95": {"rlhf": {"score": [1.5, 2.5]}},
    "wins": {"rlhf": {"sft": {"score": {"mean": 0.75, "interval_95": [0.5, 1.0], "longer": 1}}}},
}
MORE = {**METRICS, "rlhf": {"score": 4.0, "success": 0.75, "length": 10.0}}
PATHS = ["rlhf.score", "rlhf.success", "rlhf.length", "wins.rlhf.sft.score", "rlhf.judge_score"]


def test_a_result_has_its_own_interval_or_that_of_its_seeds():
    groups = [
        Group("a", [a_run("a", 1, metrics=METRICS)]),
        Group("b", [a_run("b", 1, metrics=METRICS), a_run("b2", 2, metrics=MORE)]),
        Group("c", [a_run("c", 1, metrics={"rlhf": {"length": 3.0}, "sft": {}})]),
    ]
    [table] = result_tables(groups, PATHS)
    assert table.head == ["", "a", "b", "c"]
    # 2 and 4: mean 3, standard deviation 1.414, divided by the root of 2, times 12.706.
    assert texts_of(table) == [
        ["score", "2.00 [1.50, 2.50]", "3.00 [-9.71, 15.7] n = 2", ""],
        ["correct", "50.0 %", "62.5 % [0.0 %, 100.0 %] n = 2", ""],
        ["response length (tokens)", "10.0", "10.0 n = 2", "3.00"],
        [
            "win rate of RLHF against SFT, by score",
            "75.0 % [50.0 %, 100.0 %]",
            # Equal values of seeds say nothing about the variance.
            "75.0 % [50.0 %, 100.0 %] n = 2",
            "",
        ],
    ]


def test_results_before_training_stand_beside_those_after_it():
    groups = [Group("a", [a_run("a", 1, metrics=METRICS)])]
    [table] = result_tables(groups, result_paths("rlhf", ["sft"]))
    assert texts_of(table)[:2] == [["score of SFT", "1.00"], ["score", "2.00 [1.50, 2.50]"]]
    perplexities = {"before": {"response_perplexity": 8.4}, "after": {"response_perplexity": 5.9}}
    groups = [Group("a", [a_run("a", 1, metrics=perplexities)])]
    [table] = result_tables(groups, result_paths("sft"))
    assert texts_of(table) == [
        ["perplexity of responses before training", "8.40"],
        ["perplexity of responses", "5.90"],
    ]


def test_differences_from_the_first_column_have_welchs_interval_and_a_mark():
    groups = [seeds_of("a", "loss", [1, 2, 3]), seeds_of("b", "loss", [11, 12, 13])]
    groups += [seeds_of("c", "loss", [2, 3, 4]), seeds_of("d", "loss", [9])]
    # Both standard errors are 1 / sqrt(3), that of the difference is sqrt(2/3), with t of four
    # degrees of freedom 2.776.
    half = 2.7764 * math.sqrt(2 / 3)
    far = groups[1].difference(groups[0], "loss")
    assert (far.value, far.n) == (10, 3)
    assert far.interval == pytest.approx([10 - half, 10 + half], abs=1e-3)
    table, _ = result_tables(groups, ["loss"])
    assert texts_of(table) == [
        [
            "loss (nats per row)",
            "+10.0 [+7.73, +12.3] n = 3 worse",
            "+1.00 [-1.27, +3.27] n = 3",
            "",
        ]
    ]


# --- settings that differ ------------------------------------------------------------------


def job(path, settings, *inputs, files=0):
    """A job of a lineage, by RULE/KEY."""
    files = {"number": files, "digest": "0123456789abcdef"}
    entry = {"rule": path.partition("/")[0], "settings": settings, "files": files}
    return path, entry | {"inputs": dict(enumerate(inputs))}


def differences(*lineages):
    """The differences between trainings, the first jobs of lineages."""
    return setting_differences(
        [comparable_settings(lineage, next(iter(lineage))) for lineage in lineages]
    )


def rlhf(actor, actor_epochs, reward_epochs=1):
    """RLHF from sft/ACTOR with a reward model, which was trained from sft/tiny."""
    return dict(
        [
            job(
                "train_rlhf/a",
                {"seed": actor_epochs},
                f"train_sft/{actor}",
                "train_reward/tiny",
                "tokenize_rlhf/a",
            ),
            job("train_reward/tiny", {"epochs": reward_epochs}, "train_sft/tiny"),
            job("train_sft/tiny", {"epochs": 1}, "init_model/tiny"),
            job(f"train_sft/{actor}", {"epochs": actor_epochs}, "init_model/tiny"),
            job("tokenize_rlhf/a", {"weights": [actor_epochs], "seed": actor_epochs}),
            job("init_model/tiny", {"seed": 1}),
        ]
    )


def test_a_log_has_no_settings_that_differ():
    logs = [a_run(name, None) for name in ("log", "log-2")]
    groups = group_by_settings([a_run("a", 1, kl=1, lr=1), a_run("b", 1, kl=2, lr=1), *logs])
    table = setting_table(groups)
    assert table.head == ["", "a", "b", "log", "log-2"]
    assert texts_of(table) == [["kl", "1", "2", "", ""], ["seed", "1", "1", "", ""]]


def test_earlier_jobs_are_matched_by_rule_and_not_by_name():
    assert differences(rlhf("mine", 3), rlhf("tiny", 1)) == {
        "train_sft: epochs": [[3, 1], 1],
    }


def test_equal_changes_of_several_jobs_are_one_row():
    assert differences(rlhf("tiny", 1), rlhf("tiny", 2, reward_epochs=2)) == {
        "train_sft: epochs": [1, 2]
    }


def dpo(dataset, rows):
    """DPO on a dataset."""
    return dict(
        [
            job("train_dpo/a", {}, "tokenize_dpo/a"),
            job("tokenize_dpo/a", {}, f"import_dataset/{dataset}"),
            job(f"import_dataset/{dataset}", {"rows": rows}, files=rows),
        ]
    )


def test_datasets_are_compared_by_their_settings_and_files():
    # A name alone is no difference.
    assert differences(dpo("d", 0), dpo("e", 1)) == {
        "dataset: rows": [0, 1],
        "dataset: files": ["", "0123456789ab"],
    }
    # Other rules make datasets and base models, too.
    made = [
        dict([job("train_sft/a", {}, f"{rule}/b"), job(f"{rule}/b", {key: "x"})])
        for rule, key in (("init_model", "init"), ("fetch_model", "hub"))
    ]
    assert differences(*made) == {"model: init": ["x", ""], "model: hub": ["", "x"]}


# --- stars and arrows -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "others", "marks"),
    [
        # Apart by more than their intervals; the same, but one of them overlaps.
        ([10.0, 10.1, 10.2], [12.0, 12.1, 12.2], ("best", "worse")),
        ([10.0, 10.1, 10.2], [10.1, 10.2, 10.3], ("", "")),
        # Rounding, as between ZeRO stages: apart, but in the fifth digit.
        ([595.001, 595.002, 595.003], [595.021, 595.022, 595.023], ("", "")),
    ],
)
def test_neither_noise_nor_rounding_has_a_star_or_an_arrow(values, others, marks):
    groups = [seeds_of("a", "loss", values), seeds_of("b", "loss", others)]
    differences, results = result_tables(groups, ["loss"])
    assert (results.rows[0][1].tone, differences.rows[0][1].tone) == marks
    assert results.rows[0][2].tone == ""
