"""A job of two processes at ZeRO 3, one of which is killed: the same command goes on."""

import json
import time
from dataclasses import replace

import pytest

from conftest import ROOT
from snakechat.workflow.placement import changed_values
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
    "ema_decay": 0.9,
    "dtype": "fp32",
    "placement": {"deployment": "cpu"},
}
RECIPES = {"killed": RECIPE, "whole": RECIPE}


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
            options += ["--placement", json.dumps(changed_values(placement))]
            options += ["--options", json.dumps({"save_steps": 1, "hermetic": "off"})]
            words = (PROCESSES, program, died, *options)
            return *launching.run(*words, launcher=program, folder=folder), folder

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
    assert {"model.safetensors", "ema/model.safetensors"} <= files[0].keys()
