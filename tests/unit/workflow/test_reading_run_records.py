"""run.json: what a job writes, and damaged records, which are unknown."""

import importlib.metadata
import json
import time

import pytest

from snakechat.workflow.digests import digest
from snakechat.workflow.manifest import RECORD_KEYS, read_run_record
from snakechat.workflow.placement import DEFAULTS
from snakechat.workflow.publishing import run_record

SPEC = {"requirements": {"numpy": "0.1", "not-installed-anywhere": "1.0"}}
MEASURED = {"steps": 3, "peak_memory_mb": 1, "placement": {}}
RECORD = json.loads(run_record(SPEC, DEFAULTS, MEASURED, time.time()))


def test_what_jobs_write_is_read(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(RECORD))
    assert read_run_record(tmp_path) == RECORD
    assert RECORD["versions"] == {"numpy": importlib.metadata.version("numpy")}
    assert RECORD["spec"] == digest(SPEC)


def test_a_record_without_a_key_is_unknown(tmp_path):
    for key in RECORD_KEYS:
        for changes in ({}, {key: None}):
            record = {name: value for name, value in RECORD.items() if name != key} | changes
            (tmp_path / "run.json").write_text(json.dumps(record))
            assert read_run_record(tmp_path) is None


@pytest.mark.parametrize("content", [b"[" * 5000, b"\xff", b"[]"])
def test_other_files_are_unknown(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    assert read_run_record(tmp_path) is None
    assert read_run_record(tmp_path / "missing") is None


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_clock_that_is_set_changes_no_duration(monkeypatch, seconds):
    started = time.time()
    monkeypatch.setattr(time, "time", lambda: started + seconds)
    record = json.loads(run_record(SPEC, DEFAULTS, MEASURED, started))
    assert abs(record["seconds"]) < 60
