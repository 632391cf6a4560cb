"""Reading NAME.run.json: when, where and how a job ran (snakechat.workflow.run_record)."""

import json
from pathlib import Path
from typing import Any

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
    "versions": dict,
}


def run_record_path(folder: str | Path) -> Path:
    """Return the path of the record of the run that made a result."""
    return Path(f"{folder}.run.json")


def read_run_record(folder: str | Path) -> dict[str, Any] | None:
    """Return the record of the run that made a result; None if it is missing or damaged."""
    try:
        record = json.loads(run_record_path(folder).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    is_record = all(isinstance(record.get(key), form) for key, form in KEYS.items())
    return record if is_record else None
