"""Comparisons of recipes: groups of seeds, differences, results by hand, sweeps, the page."""

import re

import pytest
import yaml

from compare_runs import Group, Run, group_by_settings, result_rows, setting_differences
from conftest import Workflow


def a_run(name, seed, steps=(), metrics=None, **settings):
    """A run as Run reads it."""
    run = Run.__new__(Run)
    run.name, run.seed, run.settings, run.steps = name, seed, settings, list(steps)
    run.metrics = metrics or {}
    return run


def english(text, **values):
    return text.format(**values)


# --- by hand --------------------------------------------------------------------------------


def test_runs_that_differ_only_in_their_seed_are_one_group():
    runs = [a_run("a", 1, kl=1), a_run("b", 1, kl=2), a_run("a2", 2, kl=1), a_run("a3", 3, kl=1)]
    first, second = group_by_settings(runs)
    assert [run.name for run in first.runs] == ["a", "a2", "a3"]
    assert (first.label(english), second.label(english)) == ("a (3 seeds)", "b")


def test_the_label_of_a_sweep_over_seeds_has_no_seed():
    runs = [a_run(f"kl-kl_coef-0.05-seed-{seed}", seed) for seed in (1, 2)]
    assert Group(runs).label(english) == "kl-kl_coef-0.05 (2 seeds)"
    assert Group(runs[:1]).label(english) == "kl-kl_coef-0.05-seed-1"


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
    assert setting_differences(groups, english) == [
        ["kl", "1", "2"],
        ["only", '"x"', ""],
        ["seed", "1, 2", "1"],
    ]


METRICS = {
    "sft": {"score": 1.0},
    "rlhf": {"score": 2.0, "success": 0.5, "length": 10.0},
    "intervals_95": {"rlhf": {"score": [1.5, 2.5]}},
    "wins": {"rlhf": {"sft": {"score": {"mean": 0.75, "interval_95": [0.5, 1.0], "longer": 1}}}},
}


def test_a_result_has_its_own_interval_or_that_of_its_seeds():
    more = {**METRICS, "rlhf": {"score": 4.0, "success": 0.75, "length": 10.0}}
    groups = [
        Group([a_run("a", 1, metrics=METRICS)]),
        Group([a_run("b", 1, metrics=METRICS), a_run("b2", 2, metrics=more)]),
        Group([a_run("c", 1, metrics={"rlhf": {"length": 3.0}})]),
    ]
    labels = {
        "rlhf.score": "score",
        "rlhf.success": "correct",
        "rlhf.length": "length",
        "wins.rlhf.sft.score": "wins",
        "rlhf.judge_score": "nowhere",
    }
    # 2 and 4: mean 3, standard deviation 1.414, divided by the root of 2, times 12.706. That of the
    # fractions 0.5 and 0.75 is wider than 0 to 1.
    assert result_rows(groups, labels, english) == [
        ["score", "2 (1.5 … 2.5)", "3 (-9.706 … 15.71)", ""],
        ["correct", "0.5", "0.625 (0 … 1)", ""],
        ["length", "10", "10 (10 … 10)", "3"],
        ["wins", "0.75 (0.5 … 1)", "0.75 (0.75 … 0.75)", ""],
    ]


# --- sweeps ---------------------------------------------------------------------------------


def planned_with(workflow, settings, target):
    """The output of a dry run with an additional config."""
    (workflow.folder / "sweep.yaml").write_text(yaml.safe_dump(settings))
    swept = Workflow(workflow.folder, *workflow.options, "sweep.yaml")
    return swept.snakemake(target, "-n").stdout


@pytest.mark.parametrize(
    ("sweep", "target", "message"),
    [
        ({"recipe": "none"}, "pair", "sweeps.mine.recipe names 'none', which is not under"),
        ({"over": {"seed": ["a b"]}}, "pair", "'mine-seed-a b' is not a valid recipe name"),
        ({"over": {"bets": [1, 2]}}, "pair", "bets"),
        ({"over": {"beta": [1.5, "x"]}}, "pair", "dpo.recipes.mine-beta-x.beta: 'x' is not of"),
        ({"over": {"beta": []}}, "pair", "sweeps.mine.over.beta"),
        ({}, "tiny", "output/compare/dpo/tiny: name two recipes, A-vs-B, or a sweep"),
        ({}, "tiny-vs-tiny", "name two recipes"),
        ({}, "tiny-vs-none", "dpo.recipes has no 'none'"),
    ],
)
def test_errors_in_sweeps_and_comparisons_are_one_line(quick, sweep, target, message):
    settings = {"stage": "dpo", "recipe": "tiny", "over": {"beta": [0.1, 0.2]}, **sweep}
    target = "mine" if target == "pair" else target
    text = planned_with(quick, {"sweeps": {"mine": settings}}, f"output/compare/dpo/{target}.html")
    [line] = [line for line in text.splitlines() if line.startswith("error: ")]
    assert message in line


def test_a_sweep_cannot_have_the_name_of_a_recipe(quick):
    settings = {"stage": "dpo", "recipe": "tiny", "over": {"beta": [0.1, 0.2]}}
    output = planned_with(quick, {"sweeps": {"tiny": settings}}, "output/dpo/tiny")
    assert "error: config: sweeps.tiny has the name of a recipe of dpo: rename it\n" in output


# --- a build --------------------------------------------------------------------------------


def test_a_sweep_is_trained_and_compared(quick, tmp_path):
    copy = quick.copy(tmp_path / "copy")
    over = {"beta": [0.1, 0.5], "seed": [1234, 7]}
    settings = {"sweeps": {"mine": {"stage": "dpo", "recipe": "tiny", "over": over}}}
    (copy.folder / "sweep.yaml").write_text(yaml.safe_dump(settings))
    copy.options = (*copy.options, "sweep.yaml", "--config", "cache=cache")
    page = copy.folder / "output/compare/dpo/mine.html"
    copy.build("output/compare/dpo/mine.html")
    text = page.read_text()
    assert text.count("<svg") == 1
    assert not re.search(r'(src|href)="(?!#)', text.replace("xlink:", ""))
    assert "<th></th><th>mine-beta-0.1 (2 seeds)</th><th>mine-beta-0.5 (2 seeds)</th>" in text
    assert "<th>beta</th><td>0.1</td><td>0.5</td>" in text
    assert "<th>seed</th><td>1234, 7</td><td>1234, 7</td>" in text
    assert re.search(r"<th>accuracy</th><td>[\d.]+ \(", text)
    # Its recipes are targets; another language rebuilds the page only.
    assert copy.planned("output/dpo/mine-beta-0.5-seed-7.manifest.json") == set()
    translated = Workflow(copy.folder, *copy.options, "language=zh")
    assert translated.planned("output/compare/dpo/mine.html") == {"compare_runs"}
    # A version in the cache, of a recipe that is no longer in the config.
    path = "output/dpo/mine-beta-0.1-seed-7"
    listed = copy.run("python", "scripts/cache.py", "list", path, "--cache", "cache").stdout
    key = re.search(r"cache/../([0-9a-f]{64})/result", listed)[1]
    (copy.folder / "sweep.yaml").write_text("{}")
    version = f"mine-beta-0.1-seed-7@{key[:12]}"
    copy.build(f"output/compare/dpo/tiny-vs-{version}.html")
    text = (copy.folder / f"output/compare/dpo/tiny-vs-{version}.html").read_text()
    assert f"<th></th><th>tiny</th><th>{version}</th>" in text
    assert "<th>seed</th><td>1234</td><td>7</td>" in text
    assert copy.planned(f"output/compare/dpo/tiny-vs-{version}.html") == set()
