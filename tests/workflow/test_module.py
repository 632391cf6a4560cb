"""Snakechat as a module of another workflow, with Snakemake's own triggers."""

import re

import pytest
import yaml

from conftest import NO_COMMAND, Workflow, edited

SNAKEFILE = """
module snakechat:
    snakefile: "chat/Snakefile"
    config: config["snakechat"]

use rule * from snakechat as snakechat_*

rule result:
    default_target: True
    input: "output/data/toy", "output/sft/tiny", "output/eval/sft/tiny/metrics.json"
    output: "files.txt"
    shell: "cat output/sft/tiny/content.txt > {output}"
"""
MODEL = {f"snakechat_{rule}" for rule in ("train_sft", "evaluate_sft", "draw_report")}


@pytest.fixture
def outer(stubs):
    """A workflow that has the stubs as a module, built."""
    folder = stubs.folder.parent / "outer"
    folder.mkdir()
    stubs.folder.rename(folder / "chat")
    (folder / "Snakefile").write_text(SNAKEFILE)
    workflow = Workflow(folder, "--configfile", "outer.yaml")
    configure(workflow)
    workflow.build()
    assert planned(workflow) == set()
    return workflow


def configure(workflow, **values):
    """Write the config of the outer workflow."""
    (workflow.folder / "outer.yaml").write_text(
        yaml.safe_dump({"snakechat": {"seed": 3, **values}})
    )


def planned(workflow, *options):
    """Return the rules that a dry run plans, without those that have no command."""
    output = workflow.snakemake("-n", *options).stdout
    found = set(re.findall(r"^(snakechat_\w+|result) +[0-9]+$", output, re.MULTILINE))
    assert found or "Nothing to be done" in output, output
    return found - {f"snakechat_{rule}" for rule in NO_COMMAND}


def test_contents_decide_in_a_module_as_they_do_alone(outer):
    sources = outer.folder / "chat/scripts"
    with edited(sources / "train_sft.py", ("run(main)", "# A comment.\nrun(main)")):
        assert planned(outer) == set()
    assert planned(outer, "--set-threads", "snakechat_train_sft=1") == set()
    configure(outer, deployments={"cpu": {"threads": 1}})
    assert planned(outer) == set()
    longer = {"recipes": {"tiny": {"learning_rate": 0.02}}}
    configure(outer, sft=longer)
    assert planned(outer) == MODEL | {"result"}
    outer.build()
    assert planned(outer) == set()
    # Back, without a job of ours.
    configure(outer)
    assert planned(outer) <= {"result"}
    assert "snakechat_train_sft" not in outer.build()
    assert planned(outer) == set()


def test_a_rule_of_a_module_is_forced_by_its_name(outer):
    assert "output/sft/tiny: the forced run made the same bytes" in outer.build(
        "files.txt", "--forcerun", "snakechat_train_sft"
    )
