"""Modules that no code digest counts: what trainings get from them cannot reach a result.

A result stays up to date when such a module changes. A function that returns something to a
training is listed here with the reason why no byte of the result depends on it.
"""

import json
import shutil

import pytest

from conftest import ROOT

pytestmark = pytest.mark.slow

PLACEMENT = "how the placement uses the hardware"
REASONS = {
    "errors.is_out_of_memory": PLACEMENT,
    "errors.ProgressLines.is_due": "whether a line of the log is printed",
    "rungs.goes_down": PLACEMENT,
    "rungs.is_open": PLACEMENT,
    "rungs.noted_number": PLACEMENT,
    "store.replies_folder": "where replies are stored",
    "store.work_path": "where a job works",
}


def test_a_training_gets_nothing_that_reaches_a_result(quick, tmp_path):
    copy = quick.copy(tmp_path / "copy")
    result = copy.folder / "output/rlhf/tiny"
    spec, before = copy.spec_of("output/rlhf/tiny"), (result / "manifest.json").read_bytes()
    shutil.rmtree((result / "manifest.json").resolve().parent)
    (copy.folder / "spec.json").write_text(json.dumps(spec))
    tracer = ROOT / "tests/support/traced_program.py"
    process = copy.run(
        *("python", tracer, "found.json", "scripts/train_rlhf.py", "--spec", "spec.json")
    )
    assert process.returncode == 0, process.stdout[-3000:]
    assert (result / "manifest.json").read_bytes() == before
    found = set(json.loads((copy.folder / "found.json").read_text()))
    assert found == REASONS.keys()
