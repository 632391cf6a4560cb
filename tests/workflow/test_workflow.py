"""The workflow around its jobs: what it rejects, and what it plans."""

import json

import pytest

from conftest import edited


def test_code_edited_after_planning_is_an_error(quick, tmp_path):
    copy = quick.copy(tmp_path / "copy")
    # On a cluster a job may wait for hours between its planning and its start.
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(copy.spec_of("output/eval/reward/tiny")))
    program = copy.folder / "scripts/evaluate_reward.py"
    with edited(program, ("pairwise_loss(*scores)", "pairwise_loss(*scores) * 2")):
        job = copy.run("python", "scripts/evaluate_reward.py", "--spec", str(spec))
    assert job.returncode == 1
    assert job.stdout == (
        "error: evaluate_reward.py changed since this build was planned: start it again\n"
    )


def test_a_damaged_input_is_an_error(quick, tmp_path):
    copy = quick.copy(tmp_path / "copy")
    weights = copy.folder / "output/sft/tiny/model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(copy.spec_of("output/eval/sft/tiny")))
    job = copy.run("python", "scripts/evaluate_sft.py", "--spec", str(spec))
    assert job.returncode == 1
    assert job.stdout == (
        "error: output/sft/tiny: model.safetensors has other content:"
        " delete output/sft/tiny and start the build again\n"
    )


def test_an_input_with_a_truncated_manifest_is_an_error(quick, tmp_path):
    copy = quick.copy(tmp_path / "copy")
    manifest = copy.folder / "output/sft/tiny.manifest.json"
    manifest.write_text(manifest.read_text()[:500])
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(copy.spec_of("output/eval/sft/tiny")))
    job = copy.run("python", "scripts/evaluate_sft.py", "--spec", str(spec))
    assert job.returncode == 1
    assert job.stdout == (
        "error: output/sft/tiny.manifest.json cannot be read: delete it and start the build again\n"
    )
    assert "train_sft" in copy.planned()
    copy.build("output/sft/tiny")
    assert json.loads(manifest.read_text())["files"]


def test_dry_run_needs_no_torch(sources):
    # A torch that cannot be imported shadows the real one.
    (sources.folder / "torch.py").write_text("raise ImportError('a dry run imports torch')\n")
    planned = sources.planned("output/rlhf/tiny", "output/dpo/tiny")
    assert planned >= {"import_dataset", "train_sft", "train_reward", "train_dpo", "train_rlhf"}


@pytest.mark.parametrize("result", ["rlhf/66b", "dpo/llama2-7b"])
def test_large_recipes_plan(sources, result):
    stage, _, _ = result.partition("/")
    planned = sources.planned(f"output/{result}")
    assert planned >= {"fetch_model", "train_sft", f"train_{stage}", f"evaluate_{stage}"}


@pytest.mark.parametrize("profile", ["slurm", "profiles/node"])
def test_profiles_plan(profile, sources):
    targets = ("output/rlhf/1.3b", "output/dpo/1.3b")
    process = sources.snakemake("-n", *targets, "--profile", profile)
    assert process.returncode == 0, process.stdout


def test_lint(sources):
    process = sources.snakemake("--lint")
    assert process.returncode == 0, process.stdout
