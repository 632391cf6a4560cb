"""Draw the plots and write the pages of a report: results, data, training, responses, costs.

Costs and throughput contain times and memory, which differ between two builds.
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from snakechat.evaluation.comparisons import initial_model
from snakechat.reporting.costs import read_runs, write_costs
from snakechat.reporting.data_plots import draw_data
from snakechat.reporting.intervals import proportion_interval
from snakechat.reporting.labels import CURVES, MODELS
from snakechat.reporting.lineage_plot import draw_lineage
from snakechat.reporting.plots import (
    curve_panels,
    downsample,
    draw_bars,
    draw_calibration,
    draw_curves,
    draw_trade_off,
    points_of,
)
from snakechat.reporting.response_examples import write_responses
from snakechat.reporting.results import win_rates_by_length, write_results
from snakechat.workflow.job import Job, run

STAGES = ("sft", "dpo", "reward", "rlhf")
# The curves of training records, and metrics that show whether RLHF is stable.
REPORT_CURVES = {
    **CURVES,
    "rlhf": {
        **CURVES["rlhf"],
        "response/ended_by_eos": "ended by EOS (fraction)",
        "policy/clipfrac_high": "ratios clipped above (fraction of tokens)",
    },
}


def main(job: Job[Any]) -> None:
    """Fill the report in the order of its chapters."""
    # RLHF from a plain model has no SFT model, and with reward functions only, no reward model.
    stages = [stage for stage in STAGES if f"train_{stage}" in job.inputs]
    metrics = {
        stage: json.loads((job.inputs[f"evaluate_{stage}"] / "metrics.json").read_text())
        for stage in stages
    }
    name, rlhf = job.spec["name"], metrics["rlhf"]

    write_results(job.result / "results.html", name, job.lineage, metrics)
    draw_trade_off(
        job.result / "wins.svg",
        win_rates_by_length(rlhf),
        "mean response length (tokens)",
        f"win rate against {MODELS[initial_model(rlhf)]} (a tie is half a win)",
    )
    write_metrics(job.result / "metrics.csv", metrics)

    statistics = read_statistics(job)
    draw_data(job.result / "data.svg", statistics, STAGES)
    write_statistics(job.result / "data.csv", statistics)

    for stage in stages:
        steps = read_json_lines(job.inputs[f"train_{stage}"] / "metrics.jsonl")
        draw_curves(job.result / f"{stage}.svg", curve_panels(steps, REPORT_CURVES[stage]))
    if "reward" in metrics:
        draw_calibration(job.result / "calibration.svg", calibration_bins(metrics["reward"]))

    responses = read_json_lines(job.inputs["evaluate_rlhf"] / "responses.jsonl")
    write_responses(job.result / "responses.html", name, responses, rlhf["num_generations"])

    draw_lineage(job.result / "lineage.svg", job.lineage)

    runs = read_runs(job.lineage)
    write_costs(job.result / "costs.html", name, runs)
    draw_costs(job.result / "costs.svg", runs)
    draw_curves(job.result / "costs_throughput.svg", throughput_panels(job, stages))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_statistics(job: Job[Any]) -> dict[str, dict[str, Any]]:
    """Read stats.json of each data job, by input name (records.DATASET, ..., tokens.STAGE)."""
    return {
        name: json.loads((folder / "stats.json").read_text())
        for name, folder in job.inputs.items()
        if name.partition(".")[0] in ("records", "rows", "tokens")
    }


def write_metrics(path: Path, metrics: dict[str, dict[str, Any]]) -> None:
    """Write all metrics of the evaluations as a table."""
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["stage", "metric", "value"])
        for stage, values in metrics.items():
            table.writerows([stage, name, f"{value:.10g}"] for name, value in flatten(values))


def write_statistics(path: Path, statistics: dict[str, dict[str, Any]]) -> None:
    """Write all statistics of the data as a table."""
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["dataset or phase", "step", "statistic", "value"])
        for name, values in statistics.items():
            step, _, of = name.partition(".")
            table.writerows([of, step, key, f"{value:.10g}"] for key, value in flatten(values))


def flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name, number) of each number in nested dicts and lists, names joined by dots."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        if isinstance(value, (dict, list)):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def calibration_bins(reward: dict[str, Any]) -> list[tuple[float, float, list[float], int]]:
    """Return the bins of a reward model's calibration with the interval of each accuracy."""
    return [
        (
            bin["confidence"],
            bin["accuracy"],
            proportion_interval(bin["accuracy"], bin["pairs"]),
            bin["pairs"],
        )
        for bin in reward["calibration"]
    ]


def draw_costs(path: Path, runs: dict[str, dict[str, Any] | None]) -> None:
    """Plot time and memory of each job."""
    panels = {"time (s)": "seconds", "peak memory (MB)": "peak_memory_mb"}
    draw_bars(
        path,
        {
            label: {
                job.removeprefix("output/"): run[key] if run else None for job, run in runs.items()
            }
            for label, key in panels.items()
        },
    )


def throughput_panels(job: Job[Any], stages: list[str]) -> dict[str, dict[str, Any]]:
    """Return panels of the throughput of each training by step, from its log if it exists."""
    panels: dict[str, dict[str, Any]] = {}
    for stage in stages:
        rule = f"train_{stage}"
        log = Path("output/logs", rule, job.inputs[rule].name, "times.jsonl")
        lines = read_json_lines(log) if log.exists() else []
        # A resumed training repeats steps; the last time counts.
        steps = list({line["step"]: line for line in lines}.values())
        panels |= curve_panels(steps, {"tokens_per_second": f"{stage} (tokens/s)"})
        if stage == "rlhf":
            sections = {key: points_of(steps, key) for key in ("generate", "score", "train")}
            panels["a step of rlhf (s)"] = {
                key: downsample(points) for key, points in sections.items() if points
            }
    return panels


if __name__ == "__main__":
    run(main)
