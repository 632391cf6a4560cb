"""The costs page of a report: time and memory of each job, machine and software."""

import json
from pathlib import Path
from typing import Any

from snakechat.reporting.formatting import format_duration
from snakechat.reporting.pages import write_page
from snakechat.workflow.lineage import lineage_columns

HEAD = [
    "",
    "started (UTC)",
    "time",
    "peak memory (MB)",
    "peak GPU memory (MB)",
    "steps",
    "seconds per step (median)",
    "host",
]
UNKNOWN = "unknown"


def read_runs(lineage: dict[str, Any]) -> dict[str, dict[str, Any] | None]:
    """Read NAME.run.json of each job of a lineage, by path.

    None stands for a run that is unknown: the file is missing, or belongs to another run than the
    one that made the result.
    """
    runs = {}
    for column in lineage_columns(lineage):
        for path in column:
            try:
                run = json.loads(Path(f"{path}.run.json").read_text())
            except (OSError, ValueError):
                run = {}
            runs[path] = run if run.get("spec") == lineage[path]["spec"] else None
    return runs


def write_costs(path: Path, name: str, runs: dict[str, dict[str, Any] | None]) -> None:
    """Write the page of costs. runs: NAME.run.json of each job, as read_runs returns them."""
    tables: list[tuple[str, list[str], list[list[Any]]]] = [
        (
            "Jobs",
            HEAD,
            [[job.removeprefix("output/"), *run_cells(run)] for job, run in runs.items()],
        )
    ]
    if run := runs[f"output/rlhf/{name}"]:
        # A run that continued after the last step has no steps of its own.
        if sections := run.get("seconds_by_section"):
            rows = [[section, seconds] for section, seconds in sections.items()]
            tables.append(("RLHF training: median seconds per step", [], rows))
        machine = [[key, run[key]] for key in ("host", "platform", "cpu", "cpus", "threads")]
        machine += [["gpu", run["gpu"]]] if "gpu" in run else []
        versions = [["Python", run["python"]], *map(list, sorted(run["versions"].items()))]
        tables += [
            ("RLHF training: machine", [], machine),
            ("RLHF training: software", [], versions),
        ]
    write_page(
        path,
        "report_costs.html",
        language="en",
        title=f"{name}: costs and software",
        total=format_duration(sum(run["seconds"] for run in runs.values() if run)),
        tables=tables,
    )


def run_cells(run: dict[str, Any] | None) -> list[Any]:
    """Return the cells of HEAD after the first one."""
    if run is None:
        return [UNKNOWN, *[None] * 6]
    keys = ("peak_memory_mb", "peak_gpu_memory_mb", "steps", "seconds_per_step")
    return [
        run["started"][:16].replace("T", " "),
        format_duration(run["seconds"]),
        *map(run.get, keys),
        run["host"],
    ]
