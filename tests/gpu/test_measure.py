"""The measurements of a GPU (measure.py), rehearsed on emulated CUDA."""

import json
import os
import subprocess
import sys

import pytest

from conftest import ROOT
from gpu.passes import GRADIENT_ERROR

pytestmark = pytest.mark.slow

# Libraries of this environment that the measurements do without.
MISSING = ("snakemake", "datasets", "jsonschema", "tensorboard", "pytest", "matplotlib")


def rehearse(folder, guard, *sections, missing=MISSING):
    """Return the lines of a rehearsal by section."""
    folder.joinpath("sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({missing}))\n"
    )
    program, out = ROOT / "tests/gpu/measure.py", folder / "out.jsonl"
    process = subprocess.run(
        [sys.executable, program, out, *sections, "--rehearse", guard],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr[-5000:]
    return read_lines(out)


def read_lines(path):
    """Return the lines of a file of results by section."""
    lines = {}
    for line in map(json.loads, path.read_text().splitlines()):
        lines.setdefault(line.pop("section"), []).append(line)
    return lines


# All sections in one process, which imports torch once.
ALL = """
import sys
from pathlib import Path
from gpu.guard import load_guard

load_guard(sys.argv[1])
from gpu import measure
from gpu.emulated_cuda import rehearsal

folder = Path(sys.argv[2])
for name, (section, _) in measure.SECTIONS.items():
    with rehearsal():
        section(measure.Bench(name, folder / "out.jsonl", folder, True))
"""


def test_all_measurements_run(tmp_path, guard):
    path = os.pathsep.join(str(ROOT / name) for name in ("tests", "scripts"))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    environment |= {"DS_ACCELERATOR": "cuda", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", ALL, guard, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr[-5000:]
    lines = read_lines(tmp_path / "out.jsonl")
    assert [*lines] == [
        *("versions", "trainers", "waits", "kernels", "sft", "decoding", "ppo", "parts"),
        *("zero", "deterministic"),
    ]
    for training in lines["trainers"]:
        assert training["steps"] == 3 and training["largest_difference"] < 1e-3, training
    for kernel in lines["kernels"]:
        assert kernel["loss_error"] < 1e-3 and kernel["gradient_error"] < GRADIENT_ERROR, kernel
    for case in [*lines["decoding"], *lines["sft"][:-1]]:
        assert case["tokens_per_second"] > 0
    assert all(lines["ppo"][0][name] > 0 for name in ("generate", "score", "train"))
    for case in lines["zero"]:
        assert case["difference_from_first"] < 2e-2 and case["difference_resumed"] == 0, case
    assert lines["deterministic"][0]["equal"]


def test_stage_0_needs_no_deepspeed(tmp_path, guard):
    lines = rehearse(tmp_path, guard, "waits", "zero", missing=(*MISSING, "deepspeed"))
    assert lines["waits"] == [{"steps": 2, "waits": {}}]
    assert lines["zero"] == [{"skipped": "needs deepspeed"}]


def test_a_section_that_fails_costs_no_other_result(tmp_path, guard):
    program, out = ROOT / "tests/gpu/measure.py", tmp_path / "out.jsonl"
    process = subprocess.run(
        [sys.executable, program, out, "versions", "parts", "--rehearse", tmp_path / "missing.so"],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1] == f"failed: versions, parts: see {out}"
    for line in map(json.loads, out.read_text().splitlines()):
        assert "missing.so" in line["failed"]
