"""How long planning takes.

In units of what Snakemake takes to start, a second of the processor on a machine that has nothing
else to do: a busy one is slower at both.
"""

import os

import pytest
import yaml

RECIPES = 1_000


@pytest.fixture
def sweep(sources):
    """A thousand chat models that differ in one number."""
    tiny = yaml.safe_load((sources.folder / "config.yaml").read_text())["rlhf"]["recipes"]["tiny"]
    first = yaml.safe_dump(tiny, default_flow_style=True, width=10_000).strip()
    lines = ["rlhf:", "  recipes:", f"    s0: &first {first}"]
    lines += [f"    s{i}: {{<<: *first, kl_coef: {0.1 + i / 1e4}}}" for i in range(1, RECIPES)]
    (sources.folder / "sweep.yaml").write_text("\n".join(lines) + "\n")
    return sources


def seconds_of(workflow, *arguments):
    """Processor seconds of a Snakemake call, and what it said."""
    before = os.times()
    process = workflow.snakemake(*arguments)
    after = os.times()
    assert process.returncode == 0, process.stdout[-3000:]
    spent = after.children_user + after.children_system
    return spent - before.children_user - before.children_system, process.stdout


@pytest.fixture
def second(sources):
    """What Snakemake takes to start."""
    return seconds_of(sources, "--version")[0]


def test_one_recipe_is_planned_in_3_seconds(sources, second):
    assert seconds_of(sources, "-n", "output/rlhf/tiny")[0] < 3 * second


def test_a_sweep_of_a_thousand_recipes_is_planned_in_15_seconds(sweep, second):
    options = ["--configfile", "sweep.yaml"]
    targets = [f"output/rlhf/s{i}" for i in range(RECIPES)]
    seconds, told = seconds_of(sweep, "-n", *targets, *options)
    assert seconds < 15 * second
    jobs = dict(line.split() for line in told.splitlines() if line.startswith("train"))
    # Two reward models: the one that they train on, and the judge that compares them.
    assert jobs == {"train_sft": "1", "train_reward": "2", "train_rlhf": "1000"}
    # One of them is not much more than one recipe of a small config.
    assert seconds_of(sweep, "-n", "output/rlhf/s500", *options)[0] < 5 * second
