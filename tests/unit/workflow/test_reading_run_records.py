"""Records of runs: damaged ones are unknown."""

import json
import time

import pytest

from snakechat.workflow.placement import SERIAL
from snakechat.workflow.run_options import DEFAULTS
from snakechat.workflow.run_record import KEYS, read_run_record, run_record

SPEC = {"requirements": {}}
RECORD = json.loads(run_record(SPEC, SERIAL, DEFAULTS, {"steps": 3}, time.time()))


def test_what_jobs_write_is_read(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(RECORD))
    assert read_run_record(tmp_path) == RECORD


@pytest.mark.parametrize("key", KEYS)
def test_a_record_without_a_key_is_unknown(tmp_path, key):
    for changes in ({}, {key: None}, {key: [1]}):
        record = {name: value for name, value in RECORD.items() if name != key} | changes
        (tmp_path / "run.json").write_text(json.dumps(record))
        assert read_run_record(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"[" * 5000, b"\xff", b"[]", b"{}"])
def test_other_files_are_unknown(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    assert read_run_record(tmp_path) is None
    assert read_run_record(tmp_path / "missing") is None
