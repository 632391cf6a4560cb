"""run.json: what a job writes."""

import importlib.metadata
import json
import time

import pytest

from snakechat.workflow.digests import digest
from snakechat.workflow.manifest import read_run_record
from snakechat.workflow.placement import DEFAULTS
from snakechat.workflow.publishing import run_record

SPEC = {"requirements": {"numpy": "0.1", "not-installed-anywhere": "1.0"}}
MEASURED = {"steps": 3, "peak_memory_mb": 1, "placement": {}}


def test_what_jobs_write_is_read(tmp_path):
    (tmp_path / "run.json").write_text(run_record(SPEC, DEFAULTS, MEASURED, time.time()))
    record = read_run_record(tmp_path)
    assert record["steps"] == 3
    assert record["versions"] == {"numpy": importlib.metadata.version("numpy")}
    assert record["spec"] == digest(SPEC)


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_clock_that_is_set_changes_no_duration(monkeypatch, seconds):
    started = time.time()
    monkeypatch.setattr(time, "time", lambda: started + seconds)
    record = json.loads(run_record(SPEC, DEFAULTS, MEASURED, started))
    assert abs(record["seconds"]) < 60
