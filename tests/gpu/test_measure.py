"""The measurements of a GPU (measure.py), rehearsed on emulated CUDA."""

import json
import os
import subprocess
import sys

import pytest

from conftest import ROOT

pytestmark = pytest.mark.slow


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
        section(measure.Bench(name, folder / "out.jsonl", folder, measure.REHEARSAL))
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
    assert [*lines] == ["versions", "trainers", "sft", "decoding", "ppo"]
    for training in lines["trainers"]:
        assert training["steps"] == 3 and training["largest_difference"] < 1e-3, training
    for case in [*lines["decoding"], *lines["sft"]]:
        assert case["tokens_per_second"] > 0
    assert all(lines["ppo"][0][name] > 0 for name in ("generate", "score", "train"))
