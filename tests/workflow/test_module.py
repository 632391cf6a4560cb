"""Snakechat as a module of another workflow, with Snakemake's own triggers."""

import re
import shutil
import subprocess
import sys

import pytest
import yaml

from conftest import NO_COMMAND, ROOT, Workflow, copy_sources, edited

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
def outer(stubs, make_once, tmp_path):
    """A copy of a workflow that has the stubs as a module, built."""
    options = ("--configfile", "outer.yaml")

    def make(folder):
        folder.mkdir()
        stubs.folder.rename(folder / "chat")
        (folder / "Snakefile").write_text(SNAKEFILE)
        workflow = Workflow(folder, *options)
        configure(workflow)
        workflow.build()
        assert planned(workflow) == set()

    return Workflow(make_once("outer", make), *options).copy(tmp_path / "outer")


def configure(workflow, **values):
    """Write the config of the outer workflow."""
    text = yaml.safe_dump({"snakechat": {"seed": 3, **values}})
    (workflow.folder / "outer.yaml").write_text(text)


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
    threads = ("--set-threads", "snakechat_train_sft=1")
    assert planned(outer, *threads) == set()
    forced = outer.snakemake("-n", "-p", "--forcerun", "snakechat_train_sft", *threads).stdout
    [command] = [line for line in forced.splitlines() if "scripts/train_sft.py" in line]
    # Commands omit values that a placement has by default, such as 1 thread.
    assert '"threads"' not in command
    forced = outer.build("files.txt", "--forcerun", "snakechat_train_sft")
    assert "output/sft/tiny: the forced run made the same bytes" in forced
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


def test_results_of_a_module_are_below_its_prefix(outer):
    text = SNAKEFILE.replace("module snakechat:", 'module snakechat:\n    prefix: "chat_results"')
    text = text.replace("output/", "chat_results/output/")
    text += "use rule train_sft from snakechat as snakechat_train_sft with:\n    priority: 5\n"
    (outer.folder / "Snakefile").write_text(text)
    outer.build()
    assert (outer.folder / "chat_results/output/sft/tiny/report").exists()
    assert planned(outer) == set()
    configure(outer, sft={"recipes": {"tiny": {"learning_rate": 0.02}}})
    assert planned(outer) == MODEL | {"result"}
    outer.build("chat_results/output/sft/tiny")
    assert planned(outer, "chat_results/output/sft/tiny") == set()


def test_a_checkpoint_of_the_other_workflow_makes_a_dataset(outer):
    (outer.folder / "Snakefile").write_text(f"""{SNAKEFILE}
checkpoint rows:
    input: "source.txt"
    output: "rows/train.jsonl"
    shell: "cp {{input}} {{output}}"

rule model:
    input: lambda wildcards: checkpoints.rows.get() and "output/sft/mine"
""")
    dataset = {"path": "rows/train.jsonl", "format": "plain"}
    recipe = {"model": "tiny", "datasets": ["mine"], "placement": {"deployment": "cpu"}}
    made = []
    # With the second seed, jobs of the other recipe start before the checkpoint ends.
    for seed, text in enumerate(("one", "two"), start=3):
        configure(outer, seed=seed, datasets={"mine": dataset}, sft={"recipes": {"mine": recipe}})
        (outer.folder / "source.txt").write_text(text)
        targets = ("files.txt", "model")
        assert "snakechat/later" not in outer.build(*targets)
        made.append((outer.folder / "output/data/mine/manifest.json").read_text())
        assert planned(outer, *targets) == set()
    assert made[0] != made[1]


# --- from a repository ----------------------------------------------------------------------------

# As `snakedeploy deploy-workflow` writes it.
DEPLOYED = """
configfile: "config/config.yaml"

module snakechat:
    snakefile:
        github("owner/snakechat", path="Snakefile", tag="v1.0.0")
    config:
        config

use rule * from snakechat
"""


@pytest.fixture
def deployed(stubs, tmp_path):
    """A deployed workflow with stubs as programs, and the folder of its installed package."""
    source = tmp_path / "owner/snakechat"
    copy_sources(source)
    for program in (stubs.folder / "scripts").glob("*.py"):
        shutil.copy(program, source / "scripts")
    for name in ("pyproject.toml", "README.md", "LICENSE", "requirements.in"):
        shutil.copy(ROOT / name, source)
    git = ("git", "-C", source, "-c", "user.name=x", "-c", "user.email=x@localhost")
    for command in (("init",), ("add", "."), ("commit", "-m", "all"), ("tag", "v1.0.0")):
        subprocess.run([*git, *command], check=True, capture_output=True)
    package = tmp_path / "package"
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--target", package)
    install = (sys.executable, "-m", "pip", "install", *options, source)
    subprocess.run(install, check=True, capture_output=True)
    folder = tmp_path / "deployed"
    shutil.copytree(ROOT / "config", folder / "config")
    shutil.copytree(ROOT / "profiles", folder / "profiles")
    (folder / "workflow").mkdir()
    (folder / "workflow/Snakefile").write_text(DEPLOYED)
    workflow = Workflow(folder)
    workflow.environment = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{tmp_path}/.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://github.com/",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    return workflow, package


def test_a_deployed_workflow_is_built_from_the_installed_package(deployed):
    workflow, package = deployed
    process = workflow.snakemake("output/sft/tiny", "--cores", "1")
    assert process.returncode != 0
    assert "needs the package snakechat 1.0.0, and this environment has none" in process.stdout
    workflow.environment["PYTHONPATH"] = str(package)
    workflow.build("output/sft/tiny")
    assert (workflow.folder / "output/sft/tiny/report").exists()
    assert workflow.planned("output/sft/tiny") == set()
    # Prompts come with the package; a folder that has its own uses them.
    assert workflow.planned("output/prompt_eval/sft/tiny.html") == {"prompt_eval", "draw_page"}
