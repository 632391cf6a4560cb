"""Evaluations in several processes, for tests/programs/test_partitioned_evaluation.py.

Argument: a JSON file with the jobs by the names of their programs.
"""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from snakechat.workflow.processes import Placement, RunOptions  # noqa: E402


def run(program, job):
    """Run the main function of a program of a job that is described by JSON values."""
    paths = {name: Path(path) for name, path in job["inputs"].items()}
    settings = SimpleNamespace(**job["settings"])
    job = SimpleNamespace(
        settings=settings,
        inputs=paths,
        placement=Placement(**job["placement"]),
        options=RunOptions(source=job["source"]),
        spec=job["spec"],
        result=Path(job["result"]),
        facts={},
        record={},
    )
    importlib.import_module(program).main(job)


if __name__ == "__main__":
    for program, job in json.loads(Path(sys.argv[1]).read_text()).items():
        run(program, job)
