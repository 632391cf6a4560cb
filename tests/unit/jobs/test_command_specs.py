"""Specs of trainings by commands: all that a command reads counts, and nothing else."""

import sys

import pytest

from conftest import ROOT
from snakechat.config.loading import load_config
from snakechat.config.recipes import ConfigError
from snakechat.jobs.staleness import Jobs
from support.configs import config_values

RECIPE = {
    "model": "sft/tiny",
    "datasets": ["toy"],
    "max_length": 96,
    "command": "bash train.sh {model} {reference} {data} {output}",
    "files": ["train.sh", "lib"],
    "placement": {"deployment": "cpu"},
}
FILES = {"train.sh": "train", "lib/a.sh": "a", "lock.txt": "pytest==1", "other.sh": "other"}


@pytest.fixture
def jobs_of(tmp_path):
    """A function that returns the Jobs of recipe dpo/mine with changes of its keys."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def of_changes(stage="dpo", **changes):
        recipe = {key: value for key, value in (RECIPE | changes).items() if value is not None}
        values = config_values({stage: {"recipes": {"mine": recipe}}})
        return Jobs(load_config(values, tmp_path, ROOT, {}), ROOT)

    return of_changes


def spec_of(jobs, rule="train_dpo", name="mine"):
    return jobs[rule, name].spec


def test_a_command_reads_its_model_its_rows_and_its_files(jobs_of):
    found = jobs_of()
    spec = spec_of(found)
    assert spec["settings"] == {"command": RECIPE["command"]}
    jobs = {key: (up["rule"], up["name"]) for key, up in spec["inputs"].items()}
    assert jobs == {"model": ("train_sft", "tiny"), "data": ("render_rows", "dpo/mine")}
    assert spec["files"].keys() == {"train.sh", "lib/a.sh"}
    # Of ours, the program that runs it, and no library.
    assert "run_command.py" in spec["code"]
    assert not any("modeling/" in name for name in spec["code"])
    assert spec["requirements"].keys() == {"python"}
    assert found["train_dpo", "mine"].options.source == str(found.config.local_path(""))


def test_rows_are_those_of_the_tokens_whatever_their_length(jobs_of):
    before, after = (
        spec_of(jobs_of(max_length=length), "render_rows", "dpo/mine") for length in (96, 64)
    )
    assert before == after
    tokens = spec_of(jobs_of(), "tokenize_dpo")
    assert tokens["settings"] == {**before["settings"], "max_length": 96}


def edit(name):
    return lambda folder: (folder / name).write_text("pytest==2")


# What a command does not receive. Rows have the weights, tokens the length, the evaluation beta.
OF_OTHERS = {"datasets": [{"toy": 2}], "max_length": 64, "seed": 7, "beta": 0.7}
OF_OTHERS |= {"gate": {"metric": "accuracy", "min": 0.5}, "placement": "single_gpu"}
WITH_SEED = {"command": "bash train.sh {output} {seed}"}
LOCKED = {"lock": "lock.txt"}


@pytest.mark.parametrize(
    ("before", "after", "action", "is_stale"),
    {
        "a named file": ({}, {}, edit("train.sh"), True),
        "a new file of a named folder": ({}, {}, edit("lib/new.sh"), True),
        "an unnamed file": ({}, {}, edit("other.sh"), False),
        "the lock": (LOCKED, LOCKED, edit("lock.txt"), True),
        "the command": ({}, {"command": "bash train.sh {model} {data} {output} 2"}, None, True),
        "the network": ({}, {"network": True}, None, True),
        "the initial model": ({}, {"model": "models/opt-125m"}, None, True),
        "what a command does not receive": ({}, OF_OTHERS, None, False),
        "the seed, which the command names": (WITH_SEED, {**WITH_SEED, "seed": 7}, None, True),
        "an interpreter": ({}, {"python": sys.executable}, None, True),
    }.values(),
    ids=lambda value: "",
)
def test_an_edit_makes_a_training_stale_that_depends_on_it(
    before, after, action, is_stale, jobs_of, tmp_path
):
    first = spec_of(jobs_of(**before))
    if action:
        action(tmp_path)
    assert (first != spec_of(jobs_of(**after))) == is_stale


def test_without_a_lock_the_distributions_of_the_interpreter_count(jobs_of):
    command = "{python} train.sh {output}"
    settings = spec_of(jobs_of(command=command))["settings"]
    version = {"python": sys.version.split()[0]}
    assert {"torch", "python"} < settings["distributions"].keys()
    settings = spec_of(jobs_of(command=command, lock="lock.txt"))["settings"]
    assert settings["distributions"] == {"pytest": "1"} | version


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": ["train.sh", "gone.py"]}, " gone.py does not exist"),
        ({"python": "gone/python"}, " .*gone/python does not exist"),
        ({"command": "a {modle} {output}"}, "command: {modle} is unknown: expected {py"),
        ({"command": "a {model}"}, "command: expected {output}, the folder that it"),
        ({"learning_rate": 1e-3}, "learning_rate: 0.001 has no effect with a command, which does"),
        ({"command": None}, r"files: \['train.sh', 'lib'\] has no effect without command"),
    ],
)
def test_a_wrong_recipe_is_one_line(changes, message, jobs_of):
    with pytest.raises(ConfigError, match=rf"^config: dpo\.recipes\.mine[.:]{message}"):
        spec_of(jobs_of(**changes))


RLHF = {"model": None, "max_length": None, "actor": "sft/tiny", "reward": "reward/tiny"}


def test_rlhf_has_a_reward_model(jobs_of):
    command = "train {model} {reference} {reward} {data} {output}"
    spec = spec_of(jobs_of("rlhf", command=command, **RLHF), "train_rlhf")
    assert spec["inputs"].keys() == {"actor", "reward", "data"}
    assert spec_of(jobs_of("rlhf", **RLHF), "train_rlhf")["inputs"].keys() == {"actor", "data"}
    several = {**RLHF, "reward": {"reward/tiny": 1, "reward/judge": 1}}
    with pytest.raises(ConfigError, match=r"{reward} is one model, and reward has 2"):
        spec_of(jobs_of("rlhf", command=command, **several), "train_rlhf")
