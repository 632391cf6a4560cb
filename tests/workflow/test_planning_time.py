"""The time that planning takes, in units of the time that Snakemake takes to start.

Starting takes about one second of CPU time on an idle machine; a busy machine is slower at both.
"""

import os

RECIPES = 300


def seconds_of(workflow, *arguments):
    """Return the CPU seconds and the output of a Snakemake command."""
    before = os.times()
    process = workflow.run("snakemake", *arguments)
    after = os.times()
    assert process.returncode == 0, process.stdout[-3000:]
    spent = after.children_user + after.children_system
    return spent - before.children_user - before.children_system, process.stdout


def test_a_sweep_takes_a_fiftieth_of_a_second_for_each_recipe_and_3_seconds(sources):
    lines = ["rlhf:", "  recipes:"]
    lines += [f"    s{i}: {{preset: tiny, kl_coef: {0.1 + i / 1e4}}}" for i in range(RECIPES)]
    (sources.folder / "sweep.yaml").write_text("\n".join(lines) + "\n")
    second, _ = seconds_of(sources, "--version")
    options = ["--configfile", "sweep.yaml"]
    targets = [f"output/rlhf/s{i}" for i in range(RECIPES)]
    seconds, output = seconds_of(sources, "-n", *targets, *options)
    assert seconds < (3 + RECIPES / 50) * second
    jobs = dict(line.split() for line in output.splitlines() if line.startswith("train"))
    # Two reward models: the one that all train on, and the judge.
    assert jobs == {"train_sft": "1", "train_reward": "2", "train_rlhf": str(RECIPES)}
    # One recipe of many takes little more than one of few.
    assert seconds_of(sources, "-n", targets[-1], *options)[0] < 4 * second
