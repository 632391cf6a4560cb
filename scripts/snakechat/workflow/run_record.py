"""run.json: when, where and how a job ran. Not part of the result: it differs in each run."""

import datetime
import json
import os
import platform
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snakechat.workflow.digests import digest
from snakechat.workflow.hermetic import hermetic_version
from snakechat.workflow.manifest import RUN_RECORD
from snakechat.workflow.pins import PYTHON, installed_versions
from snakechat.workflow.placement import RunOptions, changed_values

# What the clock shows more than the monotonic one. It is read before a run starts, so that a clock
# that is set during the run does not change its duration.
CLOCK_OFFSET = time.time() - time.monotonic()
# A variable: the folder of results from whose records a build takes its rungs (make reproduce).
REPRODUCED = "SNAKECHAT_RUNGS_OF"
# What every record has.
KEYS: dict[str, type | tuple[type, ...]] = {
    "spec": str,
    "started": str,
    "seconds": (int, float),
    "peak_memory_mb": (int, float),
    "host": str,
    "platform": str,
    "python": str,
    "placement": dict,
    "options": dict,
    "versions": dict,
}


def run_record(
    spec: Mapping[str, Any], options: RunOptions, measured: Mapping[str, Any], started: float
) -> str:
    """Return the JSON text of run.json.

    Args:
        spec: The spec of the job; the record has its digest.
        options: What the run used beside its placement.
        measured: What the program knows: placement, throughput, memory.
        started: Unix time of the start, in seconds.
    """
    record = {
        "spec": digest(spec),
        "started": datetime.datetime.fromtimestamp(started, datetime.UTC).isoformat(),
        "seconds": round(time.monotonic() + CLOCK_OFFSET - started, 3),
        **measured,
        "host": platform.node(),
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "options": changed_values(options),
        # The version of Landlock within whose limits the program ran.
        "hermetic": hermetic_version(options.hermetic),
        "python": platform.python_version(),
        "versions": installed_versions(spec["requirements"].keys() - {PYTHON}),
    }
    return json.dumps(record, indent=1, sort_keys=True) + "\n"


def read_run_record(folder: str | Path, spec: str | None = None) -> dict[str, Any] | None:
    """Return the record of the run that made a result; None if it is missing or damaged.

    spec: The digest of a spec: the record of a run with another one counts as missing.
    """
    try:
        record = json.loads(Path(folder, RUN_RECORD).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    if not all(isinstance(record.get(key), form) for key, form in KEYS.items()):
        return None
    return record if spec in (None, record["spec"]) else None


def cpu_name() -> str:
    """Return the model name of the CPU, or its architecture if the system does not name it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return match[1] if match else platform.machine()
