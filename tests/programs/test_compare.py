"""The comparison of recipes: seeds together, what differs, results by hand, sweeps, the page."""

import math
import re

import pytest
import yaml

import compare_runs
from compare_runs import Group, Run, differences, grouped, over_seeds, results
from snakechat.reporting.pages import write_page


def a_run(name, seed, steps=(), figures=None, **settings):
    """A run as Run reads it."""
    run = Run.__new__(Run)
    run.name, run.seed, run.settings, run.steps = name, seed, settings, list(steps)
    run.figures = figures or {}
    return run


# --- by hand --------------------------------------------------------------------------------


def test_runs_that_differ_in_their_seed_alone_are_one_group():
    runs = [a_run("a", 1, kl=1), a_run("b", 1, kl=2), a_run("a2", 2, kl=1), a_run("a3", 3, kl=1)]
    first, second = grouped(runs)
    assert [run.name for run in first.runs] == ["a", "a2", "a3"]
    assert (first.label, second.label) == ("a + 2", "b")


def test_students_interval_by_hand():
    # 1, 2, 3: mean 2, deviation 1, t of two degrees of freedom 4.303.
    mean, (low, high) = over_seeds([1.0, 2.0, 3.0])
    assert mean == 2
    assert low == pytest.approx(2 - 4.303 / math.sqrt(3))
    assert high == pytest.approx(2 + 4.303 / math.sqrt(3))
    assert over_seeds([5.0, 5.0]) == (5, [5, 5])


def test_curves_of_seeds_are_their_mean_and_range_where_all_have_a_step():
    runs = [
        a_run("a", 1, [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 4.0}]),
        a_run("b", 2, [{"step": 1, "loss": 3.0}]),
    ]
    assert Group(runs).points("loss") == [(1, 2.0, 1.0, 3.0)]
    assert Group(runs[:1]).points("loss") == [(1, 1.0, 1.0, 1.0), (2, 4.0, 4.0, 4.0)]


def test_settings_that_differ_are_told_and_no_others():
    groups = [
        Group([a_run("a", 1, kl=1, same=[1], only="x"), a_run("a2", 2, kl=1, same=[1], only="x")]),
        Group([a_run("b", 1, kl=2, same=[1])]),
    ]
    assert differences(groups, str) == [
        ["", "a + 1", "b"],
        ["kl", "1", "2"],
        ["only", '"x"', ""],
        ["seed", "1, 2", "1"],
    ]


FIGURES = {
    "rlhf": {"score": 2.0, "length": 10.0},
    "intervals_95": {"rlhf": {"score": [1.5, 2.5]}},
    "wins": {"rlhf": {"sft": {"score": {"mean": 0.75, "interval_95": [0.5, 1.0], "longer": 1}}}},
}


def test_a_result_has_its_own_interval_or_that_of_its_seeds():
    more = {**FIGURES, "rlhf": {"score": 4.0, "length": 10.0}}
    groups = [
        Group([a_run("a", 1, figures=FIGURES)]),
        Group([a_run("b", 1, figures=FIGURES), a_run("b2", 2, figures=more)]),
        Group([a_run("c", 1, figures={"rlhf": {"length": 3.0}})]),
    ]
    names = {
        "rlhf.score": "score",
        "rlhf.length": "length",
        "wins.rlhf.sft.score": "wins",
        "rlhf.judge_score": "nowhere",
    }
    # 2 and 4: mean 3, deviation 1.414, over the root of 2 times 12.706.
    assert results(groups, names, str) == [
        ["", "a", "b + 1", "c"],
        ["score", "2 (1.5 … 2.5)", "3 (-9.706 … 15.71)", ""],
        ["length", "10", "10 (10 … 10)", "3"],
        ["wins", "0.75 (0.5 … 1)", "0.75 (0.75 … 0.75)", ""],
    ]


def test_whatever_a_name_holds_is_text(tmp_path):
    write_page(
        tmp_path / "page.html",
        compare_runs.BODY,
        "en",
        "<script>",
        sentences=[],
        tables={"<b>": [["<i>", "<u>"]]},
        note="<s>",
    )
    text = (tmp_path / "page.html").read_text()
    assert not re.search("<(script|b|i|u|s)>", text)


# --- sweeps ---------------------------------------------------------------------------------


def planned_with(workflow, settings, target):
    """What a dry run says with a config on top."""
    (workflow.folder / "sweep.yaml").write_text(yaml.safe_dump(settings))
    return workflow.run("snakemake", target, "-n", *workflow.options, "sweep.yaml").stdout


@pytest.mark.parametrize(
    ("sweep", "target", "said"),
    [
        ({"recipe": "none"}, "pair", "sweeps.mine.recipe names 'none', which is not under"),
        ({"over": {"seed": ["a b"]}}, "pair", "'mine-seed-a b' is no name of a recipe"),
        ({"over": {"bets": [1, 2]}}, "pair", "bets"),
        ({"over": {"beta": [1.5, "x"]}}, "pair", "dpo.recipes.mine-beta-x.beta: 'x' is not of"),
        ({"over": {"beta": []}}, "pair", "sweeps.mine.over.beta"),
        ({}, "tiny", "output/compare/dpo/tiny: name two recipes, A-vs-B, or a sweep"),
        ({}, "tiny-vs-tiny", "name two recipes"),
        ({}, "tiny-vs-none", "dpo.recipes has no 'none'"),
    ],
)
def test_what_cannot_be_swept_or_compared_is_told_in_one_line(quick, sweep, target, said):
    settings = {"stage": "dpo", "recipe": "tiny", "over": {"beta": [0.1, 0.2]}, **sweep}
    target = "mine" if target == "pair" else target
    text = planned_with(quick, {"sweeps": {"mine": settings}}, f"output/compare/dpo/{target}.html")
    [line] = [line for line in text.splitlines() if line.startswith("error: ")]
    assert said in line


def test_a_sweep_is_not_called_as_a_recipe(quick):
    settings = {"stage": "dpo", "recipe": "tiny", "over": {"beta": [0.1, 0.2]}}
    said = planned_with(quick, {"sweeps": {"tiny": settings}}, "output/dpo/tiny")
    assert "error: config: sweeps.tiny has the name of a recipe of dpo\n" in said


# --- a build --------------------------------------------------------------------------------


def test_a_sweep_is_trained_and_compared(quick, tmp_path):
    copy = quick.copy(tmp_path / "copy")
    over = {"beta": [0.1, 0.5], "seed": [1234, 7]}
    settings = {"sweeps": {"mine": {"stage": "dpo", "recipe": "tiny", "over": over}}}
    (copy.folder / "sweep.yaml").write_text(yaml.safe_dump(settings))
    copy.options = (*copy.options, "sweep.yaml")
    page = copy.folder / "output/compare/dpo/mine.html"
    copy.build("output/compare/dpo/mine.html")
    text = page.read_text()
    assert text.count("<svg") == 1
    assert not re.search(r'(src|href)="(?!#)', text.replace("xlink:", ""))
    assert (
        "<th></th><td>mine-beta-0.1-seed-1234 + 1</td><td>mine-beta-0.5-seed-1234 + 1</td>" in text
    )
    assert "<th>beta</th><td>0.1</td><td>0.5</td>" in text
    assert "<th>seed</th><td>1234, 7</td><td>1234, 7</td>" in text
    assert re.search(r"<th>accuracy \(share\)</th><td>[\d.]+ \(", text)
    # Its recipes are recipes like any other; another language draws the page alone.
    assert copy.planned("output/dpo/mine-beta-0.5-seed-7.manifest.json") == set()
    copy.options = (*copy.options, "--config", "language=zh")
    assert copy.planned("output/compare/dpo/mine.html") == {"compare_runs"}
