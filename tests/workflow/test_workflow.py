"""The workflow around its jobs: what it rejects, and what it plans."""

import json

import pytest

from conftest import edited


@pytest.fixture
def copy(quick, tmp_path):
    """A copy of the quick build, and a function that runs a program with the spec of a result."""
    copy = quick.copy(tmp_path / "copy")

    def error_of(program, result):
        spec = tmp_path / "spec.json"
        spec.write_text(json.dumps(copy.spec_of(result)))
        process = copy.run("python", f"scripts/{program}.py", "--spec", str(spec))
        assert process.returncode == 1
        return process.stdout

    return copy, error_of


def test_code_edited_after_planning_is_an_error(copy):
    """On a cluster a job may wait for hours between its planning and its start."""
    copy, error_of = copy
    program = copy.folder / "scripts/evaluate_reward.py"
    with edited(program, ("pairwise_loss(*scores)", "pairwise_loss(*scores) * 2")):
        assert error_of("evaluate_reward", "output/eval/reward/tiny") == (
            "error: evaluate_reward.py changed since this build was planned: start it again\n"
        )


def test_a_damaged_input_is_an_error(copy):
    copy, error_of = copy
    weights = copy.folder / "output/sft/tiny/model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    assert error_of("evaluate_sft", "output/eval/sft/tiny") == (
        "error: output/sft/tiny: model.safetensors has other content:"
        " delete output/sft/tiny and start the build again\n"
    )


def test_large_recipes_plan(sources):
    planned = sources.planned("output/rlhf/66b", "output/dpo/llama2-7b")
    rules = {f"{verb}_{stage}" for verb in ("train", "evaluate") for stage in ("rlhf", "dpo")}
    assert planned >= {"fetch_model", "train_sft", *rules}


@pytest.mark.parametrize("profile", ["slurm", "profiles/node"])
def test_profiles_plan(profile, sources):
    targets = ("output/rlhf/1.3b", "output/dpo/1.3b")
    process = sources.snakemake("-n", *targets, "--profile", profile)
    assert process.returncode == 0, process.stdout


def test_lint(sources):
    process = sources.snakemake("--lint")
    assert process.returncode == 0, process.stdout
