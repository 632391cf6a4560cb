"""The benchmarks of training and RLHF on real rows, with few steps."""

import json
import os
import subprocess
import sys

import pytest

from conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_data")]


def work(program, *arguments):
    """Run a part of a benchmark; return what it prints."""
    command = [sys.executable, ROOT / f"tests/benchmarks/{program}.py", "--work", *arguments]
    process = subprocess.run(
        [*map(str, command)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_the_stages_of_training_are_measured(tmp_path):
    folder = tmp_path / "8,192"
    work("train", "prepare", "2", folder)
    for method in ("ours", "deepspeed_chat"):
        result = work("train", method, "sft", folder)
        assert len(result["ends"]) == 2 and result["peak_mb"] > result["idle_mb"]
    # Both start from the same weights and rows.
    assert result["loss"] == pytest.approx(work("train", "ours", "sft", folder)["loss"], rel=0.01)


def test_the_sections_of_rlhf_are_measured(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"rounds": 1, "steps": 1}))
    work("rlhf", "prepare", tmp_path, "1")
    for method in ("ours", "deepspeed_chat"):
        [step] = work("rlhf", method, tmp_path / "8,192 ppo 8x1 64", "1")["steps"]
        assert step["responses"] == 8 and min(step.values()) > 0
