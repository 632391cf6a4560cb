"""Jobs of two processes at ZeRO 3: one is killed and the same command goes on; distillation."""

import json
import re
import time
from dataclasses import replace

import pytest

from conftest import ROOT
from snakechat.workflow.placement import placement_values
from support import launching
from support.killed_rank import VICTIM
from support.stages import stages_of_small_model, toy_rows

pytestmark = pytest.mark.slow

PROCESSES, STEPS = 2, 2
RECIPE = {
    "actor": "models/random",
    "reward": None,
    "reward_functions": {"length_bounds": {"weight": 1, "arguments": {"min_characters": 12}}},
    "datasets": ["toy"],
    "algorithm": "grpo",
    "num_generations": 4,
    "rollout_batch_size": 8,
    "global_batch_size": 32,
    "max_prompt_length": 60,
    "max_response_length": 12,
    "epochs": 1,
    "max_steps": STEPS,
    "actor_learning_rate": 1.0e-3,
    "warmup_steps": 0,
    "ema_decay": 0,
    "dtype": "fp32",
    "placement": {"deployment": "cpu"},
}
# Nearly greedy: each process samples with random numbers of its own.
DISTILLED = {**RECIPE, "algorithm": "distill", "teacher": "rlhf/teacher", "temperature": 1e-4}
RECIPES = {"killed": RECIPE, "whole": RECIPE, "teacher": RECIPE, "distilled": DISTILLED}


@pytest.fixture(scope="module")
def command(tokenizer, tmp_path_factory):
    """Return a function that runs the training of a recipe in two processes at ZeRO 3."""
    rows = toy_rows(STEPS * RECIPE["rollout_batch_size"])
    folder = tmp_path_factory.mktemp("killed")
    with stages_of_small_model(folder, tokenizer, rows, {"rlhf": RECIPES}) as stages:

        def run(name, died="-"):
            settings, inputs = stages.describe("train_rlhf", name)[:2]
            inputs = {
                key: {"rule": job[0], "path": str(stages.result(*job))}
                for key, job in inputs.items()
            }
            spec = {"rule": "train_rlhf", "name": name, "path": f"output/rlhf/{name}"}
            spec |= {"settings": settings, "files": {}, "requirements": {}, "code": {}}
            (folder / "spec.json").write_text(json.dumps({**spec, "inputs": inputs}))
            placement = replace(stages.placement("train_rlhf", name), nodes=PROCESSES, zero_stage=3)
            program = ROOT / "tests/support/killed_rank.py"
            options = ["--spec", "spec.json"]
            options += ["--placement", json.dumps(placement_values(placement))]
            options += ["--options", json.dumps({"save_steps": 1, "hermetic": "off"})]
            words = (PROCESSES, program, died, *options)
            return *launching.run(*words, launcher=program, folder=folder), folder

        run.stages = stages
        yield run


def test_a_killed_process_ends_the_job_and_the_same_command_makes_the_same_bytes(command):
    code, output, folder = command("killed", "died")
    ended = time.time() - float((folder / "died").read_text())
    assert code == 128 + 9 and ended < 60, (ended, output)
    assert "Traceback" not in output
    [line] = [line for line in output.splitlines() if "SIGKILL" in line]
    assert line == f"error: process {VICTIM} of the job was ended by SIGKILL"
    assert not (folder / "output/rlhf/killed.manifest.json").exists()
    code, output, folder = command("killed")
    assert code == 0 and "resuming after step 1" in output, output
    code, output, _ = command("whole")
    assert code == 0, output
    files = [
        json.loads((folder / f"output/rlhf/{name}.manifest.json").read_text())["files"]
        for name in ("killed", "whole")
    ]
    assert files[0] == files[1]
    assert any(re.fullmatch(r"model.*[.]safetensors", name) for name in files[0])


def test_processes_that_partition_a_teacher_distill_like_one(command):
    code, output, folder = command("distilled")
    assert code == 0, output
    folders = folder / "output/rlhf/distilled", command.stages.result("train_rlhf", "distilled")
    several, one = (
        json.loads((path / "metrics.jsonl").read_text().splitlines()[0]) for path in folders
    )
    for name in ("objective/kl_to_teacher", "policy/loss", "policy/grad_norm"):
        assert several[name] == pytest.approx(one[name], rel=1e-3) and one[name]
