"""Mistakes of users and of a first hour: one line, before any work where it can be known."""

import json
import re
import shutil

import pytest

# The checks of the config are in tests/unit/config/test_checks.py: these are ways into them.
MISTAKES = {
    "tiny": "config: rlhf.recipes.tiny.actor names 'tinny', which is not under sft.recipes",
    "nothing": "config: the target names 'nothing', which is not under rlhf.recipes",
}


def last_line(process):
    return process.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("recipe", MISTAKES)
def test_a_mistake_in_the_config_or_in_a_target_is_one_line(sources, recipe):
    actor = "sft/tinny" if recipe == "tiny" else "sft/tiny"
    change = f"rlhf={{recipes: {{tiny: {{actor: {actor}}}}}}}"
    process = sources.snakemake("-n", f"output/rlhf/{recipe}", "--config", change)
    assert process.returncode == 1
    assert last_line(process).startswith(f"error: {MISTAKES[recipe]}"), process.stdout
    assert "Traceback" not in process.stdout
    assert not (sources.folder / "output").exists()


JUDGE = {"url": "http://host/v1", "model": "wise", "rubric": "Be kind.", "key_env": "JUDGE_KEY"}
# What a build needs before its first job: a config, a target, and the error.
NEEDS = [
    (
        {"rlhf": {"recipes": {"tiny": {"reward_functions": {"mine": 1}}}}},
        "rlhf/tiny",
        "rewards/mine.py: line 1: ModuleNotFoundError",
    ),
    ({}, "rlhf/1.3b", ".* needs a GPU.*--config deployment=cpu"),
    (
        {
            "datasets": {"labelled": {"label": "toy", "llm_judge": "wise"}},
            "llm_judges": {"wise": JUDGE},
        },
        "data/labelled.manifest.json",
        "llm_judges.wise.key_env: environment variable JUDGE_KEY has no key: export it",
    ),
]


@pytest.mark.parametrize(("config", "target", "error"), NEEDS)
def test_what_is_missing_ends_the_build_before_its_first_job(sources, config, target, error):
    path = sources.folder / "rewards/mine.py"
    path.write_text("import no_such_library\n\n\ndef score(prompts, responses):\n    return []\n")
    (sources.folder / "mine.yaml").write_text(json.dumps(config))
    # A GPU of this machine is hidden.
    sources.environment = {"CUDA_VISIBLE_DEVICES": ""}
    sources.options = ("--configfile", "mine.yaml")
    process = sources.snakemake(f"output/{target}", "--cores", "1")
    assert process.returncode == 1 and "Traceback" not in process.stdout
    assert re.search(f"^error: {error}", process.stdout, re.MULTILINE), process.stdout
    assert not (sources.folder / "output/logs").exists()


def test_a_job_refuses_to_run_with_another_version_of_a_library(sources):
    installed = sources.folder / "site/pyarrow-0.1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: pyarrow\nVersion: 0.1\n")
    target = "output/data/toy.manifest.json"
    sources.environment = {"PYTHONPATH": str(installed.parent)}
    process = sources.snakemake(target, "--cores", "1")
    assert process.returncode == 1
    assert "error: pyarrow 0.1 is installed, and this build was planned with" in process.stdout
    assert "pip install --no-deps --requirement requirements.txt" in process.stdout
    assert not (sources.folder / target).exists()


def test_code_that_changed_after_planning_is_an_error(quick, tmp_path):
    """On a cluster a job may wait for hours between its planning and its start."""
    copy = quick.copy(tmp_path / "copy")
    result, program = "output/eval/reward/tiny", "scripts/evaluate_reward.py"
    (copy.folder / "spec.json").write_text(json.dumps(copy.spec_of(result)))
    # Otherwise it is kept.
    shutil.rmtree((copy.folder / result).resolve())
    with (copy.folder / program).open("a") as file:
        file.write("\nassert True\n")
    process = copy.run("python", "scripts/launch.py", program, "--spec", "spec.json")
    assert (process.returncode, process.stdout) == (
        1,
        "error: evaluate_reward.py changed since this build was planned: start it again\n",
    )
