"""Files with the specs of jobs, which their programs read (snakechat.jobs.specs).

Standard library only: the workflow imports this module while it plans.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from snakechat.workflow.digests import digest, write_atomically

FOLDER = Path("output/specs")
# What planning remembers; it can be deleted at any time. Planning writes nowhere else.
MEMORY = Path(".snakemake/snakechat")
# Digests of the files of results that were checked when they were read.
CHECKED_DIGESTS = MEMORY / "results.json"


def spec_path(rule: str, name: str, spec_digest: str) -> Path:
    """Return the path of a job's spec file."""
    return FOLDER / rule / f"{name}-{spec_digest[:16]}.json"


def write_spec(spec: dict[str, Any]) -> str:
    """Write the spec file of a job, unless it exists, and return its path.

    Jobs compare a spec file with its name; a damaged one is replaced here.

    Raises:
        OSError: It cannot be written.
    """
    path = spec_path(spec["rule"], spec["name"], digest(spec))
    text = json.dumps(spec, indent=1, sort_keys=True) + "\n"
    if not path.exists() or path.read_text(errors="replace") != text:
        write_atomically(path, text, durable=False)
    return str(path)


def read_specs(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the specs in the files of a folder, without damaged ones."""
    for path in sorted(folder.glob("**/*.json")):
        with suppress(OSError, ValueError, RecursionError):
            spec = json.loads(path.read_text())
            if path.stem.endswith(f"-{digest(spec)[:16]}"):
                yield spec
