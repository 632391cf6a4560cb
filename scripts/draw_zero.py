"""Compare ZeRO stages on one page, from the runs of compare_zero: losses, times and memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from snakechat.planning.flops import communicated_elements
from snakechat.reporting.curve_points import Line, points_of
from snakechat.reporting.formatting import format_significant
from snakechat.reporting.html_pages import write_sections
from snakechat.reporting.labels import N_
from snakechat.reporting.page_parts import Section, Table
from snakechat.reporting.plots import Panel, draw_bars, draw_lines
from snakechat.reporting.translations import Translate, translator
from snakechat.training.zero_stages import stage_used
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job, run
from snakechat.workflow.manifest import manifest_path
from snakechat.workflow.run_record import read_run_record, run_record_path

# The loss that is compared: the first of these that the steps have. In RLHF it is the critic's,
# because the actor's is close to 0 by construction.
LOSSES = ("loss", "value/loss", "policy/loss")
# Other metrics of steps that are plotted if they exist.
CURVES = {"grad_norm": N_("gradient norm"), "objective/scores": N_("score")}
HEAD = (
    N_("ZeRO stage"),
    N_("loss of the first step"),
    N_("loss of the last step"),
    N_("largest difference of losses"),
    N_("largest difference of gradient norms"),
    N_("seconds per step (median)"),
    N_("peak memory of the first process (MB)"),
    N_("peak memory of its GPU (MB)"),
    N_("elements sent per step"),
)
# Measurements of run.json that are plotted.
COSTS = {
    "seconds_per_step": N_("seconds per step (median)"),
    "peak_memory_mb": N_("peak memory of the first process (MB)"),
    "peak_gpu_memory_mb": N_("peak memory of its GPU (MB)"),
}
# Reasons in run.json why a stage failed.
FAILURES = {"out of memory": N_("out of memory")}


def main(job: Job[Any]) -> None:
    """Write the page."""
    translate = translator(job.settings.language)
    comparison = Comparison(job)
    stages = [f"ZeRO {stage}" for stage in comparison.steps]
    write_sections(
        job.result / "zero.html",
        job.settings.language,
        eyebrow=translate("Comparison of ZeRO stages"),
        title=comparison.title,
        remarks=list(summary(comparison, translate)),
        sections=[
            curve_section(comparison, stages, translate),
            cost_section(comparison, stages, translate),
            Section(
                translate("All measurements"),
                shown_tables=[
                    Table(
                        "",
                        list(map(translate, HEAD)),
                        [stage_row(comparison, stage, translate) for stage in comparison.runs],
                    )
                ],
            ),
        ],
        notes=list(notes(comparison, translate)),
    )


def curve_section(comparison: "Comparison", stages: list[str], translate: Translate) -> Section:
    """Return the section of losses, gradient norms and scores by step."""
    curves = {comparison.loss: N_("loss"), **CURVES}
    panels = []
    for key, label in curves.items():
        if key in comparison.steps[comparison.base][-1]:
            lines = {
                name: Line(points_of(steps, key))
                for name, steps in zip(stages, comparison.steps.values(), strict=True)
            }
            title = translate(label)
            panels.append(Panel(title, draw_lines(title, lines, translate("step"))))
    caption = translate("Lines of stages that agree lie on top of each other.")
    return Section(translate("Steps"), panels=panels, legend=stages, caption=caption)


def cost_section(comparison: "Comparison", stages: list[str], translate: Translate) -> Section:
    """Return the section of the time of a step and of memory by stage."""
    panels = []
    for key, label in COSTS.items():
        values = [comparison.runs[stage].get(key) for stage in comparison.steps]
        if any(values):
            title = translate(label)
            bars: dict[str, dict[str, float | None]] = {
                name: {title: value} for name, value in zip(stages, values, strict=True)
            }
            panels.append(Panel(title, draw_bars(title, bars)))
    return Section(translate("Time and memory"), panels=panels)


class Comparison:
    """The runs of a recipe by ZeRO stage.

    Attributes:
        title: STAGE/NAME of the recipe.
        dtype, placement, num_processes: How the runs were trained.
        runs: run.json of each run, by ZeRO stage; {"failed": reason} for one that failed.
        steps: The steps of the runs that succeeded.
        base: The lowest stage that succeeded; other stages are compared with it.
        loss: Name of the loss that is compared.
    """

    def __init__(self, job: Job[Any]) -> None:
        folder = job.inputs["runs"]
        training = job.lineage[str(folder)]["settings"]["training"]
        record = read_run_record(folder)
        if record is None or not isinstance(record.get("stages"), dict):
            raise InputError(
                f"{run_record_path(folder)} cannot be read: delete {manifest_path(folder)} and"
                " start the build again"
            )
        self.title = f"{training['rule'].removeprefix('train_')}/{training['name']}"
        self.dtype: str = training["settings"]["dtype"]
        self.placement: dict[str, Any] = record["placement"]
        self.num_processes = self.placement["nodes"] * max(self.placement["gpus_per_node"], 1)
        self.runs = {int(stage): run for stage, run in record["stages"].items()}
        self.steps = {
            stage: read_steps(folder / f"stage-{stage}.jsonl")
            for stage, run in self.runs.items()
            if "failed" not in run
        }
        self.base = min(self.steps)
        self.loss = next(name for name in LOSSES if name in self.steps[self.base][0])

    def used_stage(self, stage: int) -> int:
        """Return the stage that the run of a stage used."""
        return stage_used(stage, self.dtype)

    def losses(self, stage: int) -> list[tuple[float, float]]:
        """Return (step, loss) of each step of a stage."""
        return points_of(self.steps[stage], self.loss)

    def largest_difference(self, stage: int, key: str) -> float | None:
        """Return the largest difference of a metric from the base over all steps, or None."""
        base = dict(points_of(self.steps[self.base], key))
        points = points_of(self.steps[stage], key)
        return max(
            (abs(value - base[step]) for step, value in points if step in base), default=None
        )

    def sent(self, stage: int) -> int:
        """Return the elements that each process sends in a step of one micro-batch."""
        models = self.runs[self.base]["models"].values()
        used = self.used_stage(stage)
        return sum(communicated_elements(model, used, self.num_processes) for model in models)


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Read the steps in metrics.jsonl, without the evaluation before the first step."""
    lines = map(json.loads, path.read_text().splitlines())
    return [line for line in lines if line["step"]]


def stage_row(comparison: Comparison, stage: int, translate: Translate) -> list[Any]:
    """Return the row of a stage in the table of HEAD."""
    run = comparison.runs[stage]
    if reason := run.get("failed"):
        return [str(stage), translate(FAILURES[reason]), *[None] * (len(HEAD) - 2)]
    losses = comparison.losses(stage)
    return [
        str(stage),
        losses[0][1],
        losses[-1][1],
        comparison.largest_difference(stage, comparison.loss),
        comparison.largest_difference(stage, "grad_norm"),
        run["seconds_per_step"],
        run["peak_memory_mb"],
        run.get("peak_gpu_memory_mb"),
        comparison.sent(stage),
    ]


def summary(comparison: Comparison, translate: Translate) -> Iterator[str]:
    """Yield sentences about the differences between stages."""
    differences = {
        stage: comparison.largest_difference(stage, comparison.loss) or 0.0
        for stage in comparison.steps
    }
    worst = max(differences, key=differences.__getitem__)
    if differences[worst]:
        yield translate(
            "The losses differ from those of stage {base} by at most {value} (stage {stage}).",
            base=comparison.base,
            value=format_significant(differences[worst]),
            stage=worst,
        )
    else:
        yield translate("The losses of all stages are equal, bit for bit.")
    yield translate(
        "A step took between {low} s (stage {first}) and {high} s (stage {last}).",
        **extremes(comparison, "seconds_per_step"),
    )
    on_gpu = comparison.placement["gpus_per_node"] > 0
    yield translate(
        "Peak memory was between {low} MB (stage {first}) and {high} MB (stage {last}).",
        **extremes(comparison, "peak_gpu_memory_mb" if on_gpu else "peak_memory_mb"),
    )


def extremes(comparison: Comparison, key: str) -> dict[str, Any]:
    """Return the smallest and the largest value of a measurement, and the stages that have them."""
    values = {stage: comparison.runs[stage][key] for stage in comparison.steps}
    first, last = (bound(values, key=values.__getitem__) for bound in (min, max))
    low, high = (format_significant(values[stage]) for stage in (first, last))
    return {"low": low, "first": first, "high": high, "last": last}


def notes(comparison: Comparison, translate: Translate) -> Iterator[str]:
    """Yield notes on how to read the table."""
    placement, dtype = comparison.placement, comparison.dtype
    yield translate(
        "Nodes: {nodes}, GPUs per node: {gpus}, processes: {processes}, dtype: {dtype}.",
        nodes=placement["nodes"],
        gpus=placement["gpus_per_node"],
        processes=comparison.num_processes,
        dtype=dtype,
    )
    for stage in (0, 1):
        if comparison.used_stage(stage) != stage:
            yield translate(
                "With {dtype}, stage {stage} runs as stage 2.", dtype=dtype, stage=stage
            )
    if comparison.num_processes == 1:
        yield translate("A single process partitions nothing and sends nothing.")
    if placement["offload"] != "none":
        yield translate("Offload: the optimizer from stage 1 on, parameters at stage 3 only.")
    yield translate(
        "Elements sent: by each process, in a step of one micro-batch, computed as in section 7 of"
        " the ZeRO paper (Rajbhandari et al. 2020): twice the trainable parameters; at stage 3, the"
        " trainable parameters once and all parameters twice."
    )


if __name__ == "__main__":
    run(main)
