"""`auto` in a placement: a training of two processes that goes down the ladder, and stays there."""

import json
import os
import re
import subprocess
from dataclasses import replace

import pytest

from conftest import PYTHON, ROOT
from snakechat.workflow.processes import changed_values
from support.stages import stages_of_small_model, toy_rows

pytestmark = pytest.mark.slow

STEPS = 4
RECIPE = {"model": "random", "datasets": ["toy"], "max_length": 90, "epochs": 1, "dtype": "bf16"}
RECIPE |= {"global_batch_size": 8, "max_steps": STEPS, "placement": {"deployment": "cpu"}}
# The weights, about 4 million, take most of the memory.
SIZES = {"hidden_size": 256, "ffn_dim": 1024, "num_hidden_layers": 4, "word_embed_proj_dim": 256}
NAMES = ("limited", "killed", "whole")


@pytest.fixture(scope="module")
def train(tokenizer, tmp_path_factory):
    """A function that trains a recipe; it returns the exit code, the output and the folder."""
    folder = tmp_path_factory.mktemp("rungs")
    rows, recipes = toy_rows(64), {"sft": dict.fromkeys(NAMES, RECIPE)}
    with stages_of_small_model(folder, tokenizer, rows, recipes, **SIZES) as stages:

        def run(name, zero_stage="auto", **environment):
            # Each has a store of its own: the recipes are equal, and so are their keys.
            work = folder / f"work-{name}"
            work.mkdir(exist_ok=True)
            spec = stages.spec("train_sft", name) | {"path": f"output/sft/{name}"}
            (work / "spec.json").write_text(json.dumps(spec))
            placement = replace(
                stages.placement("train_sft", name),
                gpus_per_node=2,
                zero_stage=zero_stage,
                micro_batch_tokens=256,
            )
            program = ROOT / "tests/support/limited_memory.py"
            words = [PYTHON, program, program, "--spec", "spec.json"]
            words += ["--placement", json.dumps(changed_values(placement))]
            words += ["--options", json.dumps({"save_steps": 1, "hermetic": "off"})]
            environment = {name: str(value) for name, value in environment.items()}
            process = subprocess.run(
                words,
                cwd=work,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "0,1", "TMPDIR": str(folder)}
                | {"LIMIT": str(1 << 40), "DS_ACCELERATOR": "cpu"}
                | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=500,
            )
            return process.returncode, process.stdout, work / f"output/sft/{name}"

        yield run


def result_of(folder):
    manifest = json.loads(folder.with_name(f"{folder.name}.manifest.json").read_text())
    return manifest["files"], json.loads((folder / "run.json").read_text())


def test_a_training_falls_from_stage_0_to_2_and_resumes_there(train):
    code, output, whole = train("whole", zero_stage=2)
    assert code == 0, output
    files, run = result_of(whole)
    weights = run["models"]["model"]["weights"]
    # With activations, stage 0 takes 20 bytes of each weight, and stage 2 in two processes 12.
    code, output, limited = train("limited", LIMIT=15 * weights, STOP=2)
    assert code == 1, output
    [failed] = set(re.findall("out of memory with (.*)", output))
    assert "zero_stage: 0" in failed and "starting again with zero_stage: 2" in failed
    assert "stopped by SIGTERM after step 2" in output
    # As after the last rung had too little memory.
    [rung] = limited.parents[2].glob("**/rung.json")
    rung.unlink()
    code, output, _ = train("limited", LIMIT=15 * weights)
    assert code == 0 and "resuming after step 2" in output, output
    assert "out of memory" not in output
    # The trial changed nothing.
    limited_files, limited_run = result_of(limited)
    assert limited_run["placement"]["zero_stage"] == 2
    assert limited_files == files


def test_a_process_that_the_kernel_kills_in_its_trial_goes_down_too(train):
    code, output, killed = train("killed", KILLED_STAGE=0)
    assert code == 0, output
    assert "killed while it tried zero_stage: 0" in output
    assert result_of(killed)[1]["placement"]["zero_stage"] == 2
