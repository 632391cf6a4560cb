"""The benchmark of a GPU (make bench-gpu) with the smallest shapes on the CPU."""

import json
import os
import subprocess
import sys

import pytest

from conftest import ROOT

pytestmark = pytest.mark.slow


def bench(folder, *arguments):
    """Run the benchmark dry; return the finished process and its results."""
    program = ROOT / "tests/benchmarks/gpu.py"
    options = ["--dry", "--results", folder, "--trl-python", folder / "missing", *arguments]
    process = subprocess.run(
        [sys.executable, program, *options],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    [path] = folder.glob("gpu-*.json")
    assert process.stdout.splitlines()[-1] == str(path)
    return process, json.loads(path.read_text())


@pytest.mark.exhaustive
def test_a_dry_run_measures_all_methods_and_switches(tmp_path):
    process, results = bench(tmp_path)
    entries = results["measurements"]
    for name, entry in entries.items():
        if " / trl" in name:
            assert entry == {"skipped": f"{tmp_path}/missing does not exist: TRL is not installed"}
            continue
        assert "failed" not in entry and "skipped" not in entry, (name, entry, process.stderr)
        assert entry["seconds_per_step"] > 0 and entry["speed_of_snakechat_over_this"] > 0
        if "ppo" in name or "grpo" in name:
            sections = [entry[section] for section in ("generate", "score", "train")]
            assert entry["seconds_per_step"] == pytest.approx(sum(sections), abs=1e-3)
            assert entry["responses_per_second"] > 0
        else:
            assert entry["tokens_per_second"] > 0
        if "snakechat" in name:
            assert entry["estimated_peak_mb"] > 0
    methods = {tuple(name.split(" / ")[1:3]) for name in entries}
    jobs = ("sft", "reward", "dpo", "ppo")
    assert {(job, method) for job in jobs for method in ("snakechat", "deepspeed_chat")} <= methods
    assert {("grpo", "snakechat"), ("grpo", "trl"), ("sft", "hugging_face")} <= methods
    # The first losses of all methods that start from the same weights.
    methods = ("snakechat", "hugging_face", "deepspeed_chat")
    losses = [entries[f"opt-1.3b / sft / {method}"]["first_loss"] for method in methods]
    assert losses == pytest.approx(losses[:1] * 3, rel=0.02)


def test_what_does_not_fit_into_the_time_is_skipped_by_name(tmp_path):
    _, results = bench(tmp_path, "--minutes", "0")
    entries = {name: entry for name, entry in results["measurements"].items() if "trl" not in name}
    assert len(entries) > 10
    assert set(map(str, entries.values())) == {"{'skipped': 'no time is left'}"}


def test_a_machine_without_a_gpu_gets_one_line(tmp_path):
    process = subprocess.run(
        [sys.executable, ROOT / "tests/benchmarks/gpu.py", "--results", tmp_path],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith("torch finds no GPU")
    assert not list(tmp_path.iterdir())


MICRO_BATCH = """
import pathlib, sys, types, rlhf
folder = pathlib.Path(sys.argv[1])
case = types.SimpleNamespace(**rlhf.CASES[0]._asdict(), kl_coef=0.1)
print(rlhf.rlhf_job(case, folder, folder / "result", 1).placement["micro_batch_tokens"])
"""


@pytest.mark.parametrize(("setup", "expected"), [({}, 8192), ({"micro_batch_tokens": 512}, 512)])
def test_a_setup_replaces_the_micro_batches_of_rlhf(tmp_path, setup, expected):
    if setup:
        (tmp_path / "setup.json").write_text(json.dumps({"placement": setup}))
    command = [sys.executable, "-c", MICRO_BATCH, tmp_path]
    output = subprocess.check_output(command, cwd=ROOT / "tests/benchmarks", text=True)
    assert int(output) == expected
