"""NAME.run.json."""

import importlib.metadata
import json
import time

from snakechat.workflow.digests import digest
from snakechat.workflow.placement import SERIAL
from snakechat.workflow.run_options import DEFAULTS
from snakechat.workflow.run_record import run_record


def test_a_record_names_installed_versions_and_leaves_out_what_is_missing():
    spec = {"requirements": {"numpy": "0.1", "not-installed-anywhere": "1.0"}}
    record = json.loads(run_record(spec, SERIAL, DEFAULTS, {}, time.time()))
    assert record["versions"] == {"numpy": importlib.metadata.version("numpy")}
    assert record["spec"] == digest(spec)
