"""ZeRO as one of 64 processes: the share of the optimizer's weights that a process has."""

import json
import subprocess
import sys

import pytest

from conftest import ROOT


@pytest.mark.slow
def test_a_process_updates_its_share_of_the_weights():
    command = [sys.executable, "-W", "ignore", ROOT / "tests/gpu/fake_ranks.py"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-5000:]
    assert json.loads(process.stdout) == {"0": 1, "2": 1 / 64, "3": 1 / 64}
