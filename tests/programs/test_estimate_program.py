"""The program estimate.py: what it prints about a plan."""

import re

import pytest

from support.configs import project_values
from support.hub import serving_opt


@pytest.fixture
def estimate(sources, tmp_path):
    """A function that returns what estimate.py prints, with a Hub that has the configs of OPT."""
    with serving_opt(tmp_path / "home") as (hub, environment):
        sources.environment = environment

        def run(*words):
            process = sources.run("python", "scripts/estimate.py", *words)
            assert process.returncode == 0, process.stdout
            return process.stdout

        yield run
        # No weights are downloaded.
        for repository in hub.repositories:
            assert hub.loads(repository).keys() <= {"config.json"}


def test_a_plan_of_a_fresh_tree(estimate, sources):
    output = estimate("output/rlhf/13b", "--gpu", "a100-80g")
    rows = dict(re.findall(r"^(\w+ [\w./-]+)(  .*)$", output, re.MULTILINE))
    for name in ("train_sft 13b", "train_rlhf 13b"):
        # Bytes of memory and their moment, bytes of disk, hours.
        assert re.fullmatch(r" +8 +[\d.]+ GiB +\w+ +[\d.]+ GiB +[\d.]+", rows[name])
    # Evaluations have one process.
    assert re.match(r" +1 .* scoring ", rows["evaluate_rlhf 13b"])
    assert rows["draw_report rlhf/13b"].split() == ["?"]
    # The placement of these recipes leaves the stage open.
    assert re.search(
        "^zero_stage: 0, activation_checkpointing: false, micro_", output, re.MULTILINE
    )
    *_, last = output.splitlines()
    total = rf"{len(rows)} of {len(rows)} jobs are stale: [\d,.]+ GPU hours, [\d.]+ GiB of disk for"
    assert re.match(total, last)
    assert last.endswith("GiB for the checkpoints of a training job")
    assert not (sources.folder / "output/models").exists()


@pytest.mark.exhaustive
def test_the_shipped_recipes_fit_on_gpus_with_80_gb(estimate):
    config = project_values()
    # The recipes of OPT.
    targets = [f"output/rlhf/{name}" for name in config["rlhf"]["recipes"] if name[0].isdigit()]
    output = estimate(*targets, "--gpu", "a100-80g")
    # A warning about time: one GPU cannot hold this model while it samples.
    [warning] = re.findall("^warning: (.*)", output, re.MULTILINE)
    assert warning.startswith("train_rlhf 66b: each token gathers all weights")
