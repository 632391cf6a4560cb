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
    expecting(tree)
    assert build(tree) == (0, [])
    unjudged = results(tree)
    accuracy = json.loads((tree.folder / "output/eval/reward/tiny/metrics.json").read_text())
    accuracy = f"{accuracy['accuracy']:.4g}"
    expecting(tree, expect={"accuracy": {"min": 0}, "loss": {"max": 1000}})
    met = (0, ["reward/tiny meets its expectations: accuracy, loss"])
    assert tree.planned(TARGET) == {"draw_report"}
    assert build(tree) == met == build(tree)
    page, card = results(tree)
    assert page.count('<td class="met">') == 2 and '<td class="missed">' not in page
    assert "- met: loss is" in card and "missed" not in card
    # Another bound trains and evaluates nothing.
    expecting(tree, expect={"accuracy": {"min": 1.5}, "loss": {"max": 1000}})
    line = f"error: reward/tiny: accuracy is {accuracy}, expected at least 1.5"
    assert tree.planned(TARGET) == {"draw_report"}
    assert build(tree) == (1, [line])
    # Nor does a build with nothing to do pass.
    assert tree.planned(TARGET) == set()
    assert build(tree) == (1, [line])
    page, card = results(tree)
    assert "reward/tiny misses what it is expected to reach: accuracy." in page
    assert page.count('<td class="met">') == 1 == page.count('<td class="missed">')
    assert f"- **missed**: accuracy is {accuracy}, expected at least 1.5" in card
    # The report of Snakemake is written before the verdict.
    assert build(tree, "--report", "report.html", "--report-after-run") == (1, [line])
    assert (tree.folder / "report.html").exists()
    # A dry run judges nothing.
    assert tree.snakemake(TARGET, "-n").returncode == 0
    # The card is only judged: the model is what it was.
    assert tree.run("python", "scripts/verify.py").returncode == 0
    expecting(tree)
    assert build(tree) == (0, [])
    assert results(tree) == unjudged


@pytest.mark.slow
def test_a_baseline_is_written_and_compared_with(tree):
    expecting(tree, not_worse_than="baselines/reward/tiny.json")
    # Without the file, a dry run ends with how to write one, and it can be written.
    process = tree.snakemake(TARGET, "-n")
    assert process.returncode == 1
    assert (
        "error: config: reward.recipes.tiny.not_worse_than: baselines/reward/tiny.json: No such"
        in (process.stdout)
    )
    assert "python scripts/bless.py output/reward/RECIPE" in process.stdout
    bless = ["python", "scripts/bless.py", TARGET, *tree.options]
    process = tree.run(*bless)
    assert process.returncode == 0, process.stdout
    path = tree.folder / "baselines/reward/tiny.json"
    baseline = json.loads(path.read_text())
    assert baseline["stage"], baseline["recipe"] == ("reward", "tiny")
    assert build(tree) == (0, ["reward/tiny meets its expectations: accuracy"])
    # Those of a much better model.
    baseline["figures"]["accuracy"] = [1.9, [1.8, 2.0]]
    path.write_text(json.dumps(baseline))
    code, [line] = build(tree)
    assert code == 1 and "expected not worse than 1.9 of baselines/reward/tiny.json" in line
    for text in ("[]", "no JSON", json.dumps({**baseline, "figures": {"accuracy": 1}})):
        path.write_text(text)
        process = tree.snakemake(TARGET, "-n")
        assert "baselines/reward/tiny.json is no baseline: write one with" in process.stdout
    path.write_text(json.dumps({**baseline, "stage": "dpo"}))
    assert "is a baseline of stage dpo, expected reward" in tree.snakemake(TARGET, "-n").stdout
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
        figure = figure_of(stage, metrics, path)
        assert figure is not None, path
        assert (figure.interval is not None) == has_interval(stage, path), path
    if stage in COMPARED:
        assert figures_of(stage, evaluation)["figures"]
