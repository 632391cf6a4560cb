"""Estimates of memory, against whole steps at real size on tensors without data."""

import json
import subprocess
import sys

import pytest

from conftest import ROOT
from gpu.simulated_memory import CASES


@pytest.mark.slow
def test_the_peak_of_two_steps_is_that_of_the_estimate(guard):
    command = [sys.executable, "-W", "ignore", ROOT / "tests/gpu/simulated_memory.py"]
    process = subprocess.run(
        [*map(str, command), str(guard), *CASES], capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, process.stderr[-5000:]
    for name, case in json.loads(process.stdout).items():
        assert case["peak"] == pytest.approx(case["estimate"], rel=0.03), name
