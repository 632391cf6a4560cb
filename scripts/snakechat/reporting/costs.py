"""Tables of costs: time and memory of each job, throughput and software of a training."""

from collections.abc import Mapping, Sequence
from typing import Any

from snakechat.reporting.formatting import format_duration, format_memory, format_number
from snakechat.reporting.labels import N_, STAGES
from snakechat.reporting.origins import rebuild_command
from snakechat.reporting.page_parts import Section, Table, value_table
from snakechat.reporting.throughput import throughput
from snakechat.reporting.translations import translate
from snakechat.workflow.lineage import upstream_first
from snakechat.workflow.run_record import read_run_record

HEAD = (
    N_("job"),
    N_("started (UTC)"),
    N_("time"),
    N_("peak memory of the first process"),
    N_("peak memory of its GPU"),
)
# What the run of a training has tables of their own for, or the title of the page.
APART = ("spec", "placement", "versions", "options", "seconds", "peak_memory_mb")

Runs = dict[str, dict[str, Any] | None]


def read_runs(lineage: dict[str, Any]) -> Runs:
    """Read run.json of each job of a lineage, by path.

    None stands for a run that is unknown: the file is missing or damaged, or belongs to another run
    than the one that made the result.
    """
    return {path: read_run_record(path, lineage[path]["spec"]) for path in upstream_first(lineage)}


def total_cost(runs: Runs) -> str:
    """Return the time of all jobs together."""
    return format_duration(sum(run["seconds"] for run in runs.values() if run))


def job_section(runs: Runs) -> Section:
    """Return the section of the time and the memory of the jobs."""
    rows = [[path.removeprefix("output/"), *run_cells(run)] for path, run in runs.items()]
    rows.append([translate("time of all jobs"), "", total_cost(runs), None, None])
    note = translate("The time of a resumed training starts where it was resumed.")
    return Section(
        translate("Costs"), tables=[Table("", [translate(label) for label in HEAD], rows, note)]
    )


def run_cells(run: dict[str, Any] | None) -> list[Any]:
    """Return the cells of HEAD after the first one."""
    if run is None:
        return [translate("unknown"), *[None] * 3]
    gpu = run.get("peak_gpu_memory_mb")
    return [
        run["started"][:16].replace("T", " "),
        format_duration(run["seconds"]),
        format_memory(run["peak_memory_mb"]),
        gpu and format_memory(gpu),
    ]


def run_section(
    stage: str,
    path: str,
    settings: Mapping[str, Any],
    run: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    train: Mapping[str, Any],
) -> Section:
    """Return the section of the run of a training, by the keys of run.json.

    Args:
        stage: sft, reward, dpo or rlhf.
        path: Path of the training.
        settings: Settings of the training.
        run: run.json of the training.
        steps: The lines of metrics.jsonl.
        train: stats.json of the tokens that it was trained on.
    """
    measured = {key: value for key, value in run.items() if key not in APART}
    measured |= {
        "command": rebuild_command(path, run),
        "time": format_duration(run["seconds"]),
        "peak_memory": format_memory(run["peak_memory_mb"]),
    }
    if "seconds_per_step" in run:
        measured |= throughput(stage, settings, run, steps, train)
    shown = {
        key: format_number(value) if isinstance(value, float) else value
        for key, value in measured.items()
    }
    note = translate(
        "Floating point operations are counted as in appendix B of the PaLM paper (Chowdhery et al."
        " 2022), without padding and recomputation. Rates are measured on the median step, without"
        " saving, loading and evaluation."
    )
    return Section(
        translate("Run: {model}", model=translate(STAGES[stage])),
        tables=[value_table("", shown, note)],
        folded=[
            value_table(translate("Placement"), run["placement"]),
            value_table(translate("Software"), run["versions"]),
        ],
    )
