"""A time limit ends a training in the middle of a long phase: it loses no step that was done."""

import signal
import time

import pytest

from conftest import ROOT
from support.launching import launch

pytestmark = pytest.mark.slow

PROGRAM = ROOT / "tests/support/slow_training.py"


def outcome(folder):
    """Train to the end; return the bytes of the result."""
    process = launch(2, PROGRAM, folder, "none")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return {path.name: path.read_bytes() for path in (folder / "result").iterdir()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return outcome(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(("phase", "step"), [("sample", 3), ("evaluate", 4)])
def test_a_signal_while_one_process_is_slow_saves_all_steps(phase, step, tmp_path, expected):
    process = launch(2, PROGRAM, tmp_path, phase)
    while not (tmp_path / "waiting").exists() and process.poll() is None:
        time.sleep(0.1)
    # The others have reached the barrier.
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    # Clusters kill a job some 30 seconds later.
    output, _ = process.communicate(timeout=30)
    assert f"stopped by SIGTERM after step {step}: run the same command" in output
    assert outcome(tmp_path) == expected
