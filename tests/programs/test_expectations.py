"""What recipes expect of their evaluations: exit codes, messages, pages and model cards."""

import json

import pytest
import yaml

from conftest import Workflow
from snakechat.config.expectations import expected_metrics, has_interval
from snakechat.reporting.verdicts import COMPARED, figure_of, figures_of
from support.configs import load

TARGET = "output/reward/tiny"


@pytest.fixture(scope="module")
def tree(quick, scratch):
    """A copy of the quick build; each test writes its config first."""
    copy = quick.copy(scratch / "expectations")
    copy.build("output/report/reward/tiny")
    return Workflow(copy.folder, *copy.options, "mine.yaml")


def expecting(tree, **settings):
    """Set what the reward model is expected to reach."""
    config = {"reward": {"recipes": {"tiny": settings}}}
    (tree.folder / "mine.yaml").write_text(yaml.safe_dump(config))


def build(tree, *options):
    """Build; return the exit code and the lines with verdicts."""
    process = tree.snakemake(TARGET, "--cores", "1", *options)
    lines = process.stdout.splitlines()
    starts = ("error: ", "reward/tiny meets")
    return process.returncode, [line for line in lines if line.startswith(starts)]


def results(tree):
    """The report and the model card."""
    report = tree.folder / "output/report/reward/tiny/results.html"
    return report.read_text(), (tree.folder / TARGET / "README.md").read_text()


@pytest.mark.slow
def test_a_missed_expectation_keeps_and_marks_the_result(tree):
    expecting(tree, expect={"accuracy": {"min": 0}, "loss": {"max": 1000}})
    assert tree.planned(TARGET) == {"draw_report"}
    assert build(tree) == (0, ["reward/tiny meets its expectations: accuracy, loss"])
    page, card = results(tree)
    assert page.count('<td class="met">') == 2 and '<td class="missed">' not in page
    assert "- met: loss is" in card and "missed" not in card
    # Another bound trains and evaluates nothing.
    expecting(tree, expect={"accuracy": {"min": 1.5}, "loss": {"max": 1000}})
    metrics = json.loads((tree.folder / "output/eval/reward/tiny/metrics.json").read_text())
    missed = f"accuracy is {metrics['accuracy']:.4g}, expected at least 1.5"
    assert tree.planned(TARGET) == {"draw_report"}
    assert build(tree) == (1, [f"error: reward/tiny: {missed}"])
    page, card = results(tree)
    assert "reward/tiny misses what it is expected to reach: accuracy." in page
    assert page.count('<td class="met">') == 1 == page.count('<td class="missed">')
    assert f"- **missed**: {missed}" in card
    # A build with nothing to do does not pass; a dry run judges nothing.
    assert tree.planned(TARGET) == set()
    assert build(tree) == (1, [f"error: reward/tiny: {missed}"])
    # The model is what it was.
    assert tree.run("python", "scripts/verify.py").returncode == 0


@pytest.mark.slow
def test_a_baseline_is_written_and_compared_with(tree):
    expecting(tree, not_worse_than="baselines/reward/tiny.json")
    # Planning without the file ends with how to write it, which needs no such plan.
    process = tree.snakemake(TARGET, "-n")
    assert process.returncode == 1
    place = "error: config: reward.recipes.tiny.not_worse_than: baselines/reward/tiny.json: No such"
    assert place in process.stdout
    bless = ["python", "scripts/bless.py", TARGET, *tree.options]
    process = tree.run(*bless)
    assert process.returncode == 0, process.stdout
    assert build(tree) == (0, ["reward/tiny meets its expectations: accuracy"])
    # Figures of stale results are none of today.
    expecting(tree, epochs=3)
    process = tree.run(*bless)
    assert process.returncode == 1
    assert process.stdout.endswith("is missing or stale: build output/reward/tiny first\n")


def test_a_recipe_is_a_baseline_that_is_built_too(tree):
    config = yaml.safe_load((tree.folder / "config.yaml").read_text())
    other = {"reward": {"recipes": {"other": config["reward"]["recipes"]["tiny"]}}}
    expecting(tree, not_worse_than="other")
    (tree.folder / "other.yaml").write_text(yaml.safe_dump(other))
    planned = Workflow(tree.folder, *tree.options, "other.yaml").planned(TARGET)
    rules = {"tokenize_reward", "train_reward", "evaluate_reward", "draw_report"}
    assert planned - {"reward"} == rules


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "rlhf"])
def test_evaluations_have_the_metrics_that_can_be_expected(quick, stage):
    quick_config = yaml.safe_load((quick.folder / quick.options[-1]).read_text())
    evaluation = quick.folder / f"output/eval/{stage}/tiny"
    metrics = json.loads((evaluation / "metrics.json").read_text())
    for path in expected_metrics(load(quick_config), stage, "tiny"):
        figure = figure_of(metrics, path)
        assert figure is not None, path
        assert (figure.interval is not None) == has_interval(stage, path), path
    if stage in COMPARED:
        assert figures_of(stage, evaluation)["figures"]
