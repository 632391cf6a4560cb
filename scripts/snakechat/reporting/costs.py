"""The costs chapter of a report: time and memory of each job, machine and software."""

from typing import Any

from snakechat.reporting.formatting import format_duration, format_memory
from snakechat.reporting.labels import N_
from snakechat.reporting.page_parts import Section, Table
from snakechat.reporting.plots import Panel, draw_bars
from snakechat.reporting.translations import Translate
from snakechat.workflow.lineage import lineage_columns
from snakechat.workflow.run_record import read_run_record

HEAD = (
    N_("job"),
    N_("started (UTC)"),
    N_("time"),
    N_("peak memory"),
    N_("peak GPU memory"),
    N_("steps"),
    N_("seconds per step (median)"),
    N_("host"),
)
MACHINE = {
    "host": N_("host"),
    "platform": N_("operating system"),
    "cpu": "CPU",
    "cpus": N_("cores"),
    "threads": N_("threads"),
    "gpu": "GPU",
}
UNKNOWN = N_("unknown")

Runs = dict[str, dict[str, Any] | None]


def read_runs(lineage: dict[str, Any]) -> Runs:
    """Read NAME.run.json of each job of a lineage, by path.

    None stands for a run that is unknown: the file is missing or damaged, or belongs to another run
    than the one that made the result.
    """
    paths = [path for column in lineage_columns(lineage) for path in column]
    return {path: read_run_record(path, lineage[path]["spec"]) for path in paths}


def total_cost(runs: Runs) -> str:
    """Return the time of all jobs together."""
    return format_duration(sum(run["seconds"] for run in runs.values() if run))


def cost_sections(
    runs: Runs, path: str, throughput: Section | None, translate: Translate
) -> list[Section]:
    """Return the sections of costs: time and memory of the jobs, throughput, machine and software.

    Args:
        runs: NAME.run.json of each job, as read_runs returns them.
        path: The training whose machine and software are shown.
        throughput: Curves of the trainings.
    """
    names = {job: job.removeprefix("output/") for job in runs}
    seconds, memory = translate("time (s)"), translate("peak memory (MB)")
    panels = []
    for title, key in ((seconds, "seconds"), (memory, "peak_memory_mb")):
        bars: dict[str, dict[str, float | None]] = {
            names[job]: {title: run[key] if run else None} for job, run in runs.items()
        }
        panels.append(Panel(title, draw_bars(title, bars)))
    rows = [[names[job], *run_cells(run, translate)] for job, run in runs.items()]
    sections = [
        Section(
            translate("Jobs"),
            panels=panels,
            caption=translate(
                "Memory is that of the first process of a job. The time of a training that was"
                " interrupted and resumed counts from its last start. A missing bar means that the"
                " run is unknown."
            ),
            tables=[Table(translate("Jobs"), list(map(translate, HEAD)), rows)],
        )
    ]
    if throughput and throughput.panels:
        sections.append(throughput)
    if run := runs.get(path):
        sections.append(machine_section(run, path.removeprefix("output/"), translate))
    return sections


def machine_section(run: dict[str, Any], name: str, translate: Translate) -> Section:
    """Return the section of the machine and the software of a training."""
    machine = [[translate(label), run[key]] for key, label in MACHINE.items() if key in run]
    versions = [["Python", run["python"]], *map(list, sorted(run["versions"].items()))]
    return Section(
        translate("Machine and software of {name}", name=name),
        tables=[
            Table(translate("Machine"), [], machine),
            Table(translate("Software"), [], versions),
        ],
    )


def run_cells(run: dict[str, Any] | None, translate: Translate) -> list[Any]:
    """Return the cells of HEAD after the first one."""
    if run is None:
        return [translate(UNKNOWN), *[None] * 6]
    gpu = run.get("peak_gpu_memory_mb")
    return [
        run["started"][:16].replace("T", " "),
        format_duration(run["seconds"]),
        format_memory(run["peak_memory_mb"]),
        gpu and format_memory(gpu),
        run.get("steps"),
        run.get("seconds_per_step"),
        run["host"],
    ]
