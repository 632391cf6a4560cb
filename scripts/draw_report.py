"""Draw the curves and write the tables and pages of a recipe's three stages.

Costs and throughput tell times and memory, so that no two builds have the same ones.
"""

import csv
import json
from pathlib import Path

from snakechat.reporting.plots import (
    COLOURS,
    CURVES,
    draw_bars,
    draw_calibration,
    draw_curves,
    draw_trade_off,
    panels_for,
    panels_of,
    plt,
    points_of,
    save,
    thinned,
)
from snakechat.reporting.report_tables import (
    runs_of,
    share_interval,
    trade_off,
    write_costs,
    write_responses,
    write_results,
)
from snakechat.workflow.job import run
from snakechat.workflow.lineage import direct_inputs, lineage_columns

STAGES = ("sft", "reward", "rlhf")
# What is drawn of steps: what records have too, and what is to be looked at beside it.
DRAWN = {
    **CURVES,
    "rlhf": {
        **CURVES["rlhf"],
        "response/ended_by_eos": "ended by eos (share)",
        "policy/clipfrac": "clipped ratios (share of tokens)",
    },
}
# Of responses, across and up.
TRADED = ("mean length (tokens)", "wins over SFT (share; a tie is half)")


def main(job):
    """Results, data, stages, responses, origins and costs, in the order of a reader."""
    # Where functions alone score, there is no reward model.
    stages = [stage for stage in STAGES if f"train_{stage}" in job.inputs]
    figures = {stage: read_figures(job, stage) for stage in stages}
    name, told = job.spec["name"], figures["rlhf"]
    write_results(job.result / "results.html", name, job.lineage, figures)
    draw_trade_off(job.result / "wins.svg", trade_off(told), *TRADED)
    write_figures(job.result / "figures.csv", figures)
    report_data(job)
    for stage in stages:
        lines = (job.inputs[f"train_{stage}"] / "metrics.jsonl").read_text().splitlines()
        panels = panels_of([json.loads(line) for line in lines], DRAWN[stage])
        draw_curves(job.result / f"{stage}.svg", panels)
    if "reward" in figures:
        draw_calibration(job.result / "calibration.svg", bins_of(figures["reward"]))
    lines = (job.inputs["evaluate_rlhf"] / "responses.jsonl").read_text().splitlines()
    responses = [json.loads(line) for line in lines]
    write_responses(job.result / "responses.html", name, responses, told["num_generations"])
    draw_lineage(job.result / "lineage.svg", job.lineage)
    runs = runs_of(job.lineage)
    write_costs(job.result / "costs.html", name, runs)
    draw_costs(job.result / "costs.svg", runs)
    draw_curves(job.result / "throughput.svg", throughput(job, stages))


def read_figures(job, stage):
    """metrics.json of a stage's evaluation."""
    return json.loads((job.inputs[f"evaluate_{stage}"] / "metrics.json").read_text())


def write_figures(path, figures):
    """All figures of the stages as a table."""
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["stage", "figure", "value"])
        for stage, found in figures.items():
            table.writerows([stage, name, f"{value:.10g}"] for name, value in flat(found))


def bins_of(reward):
    """The bins of a reward model's calibration, with the interval of each accuracy."""
    return [
        (
            bin["confidence"],
            bin["accuracy"],
            share_interval(bin["accuracy"], bin["pairs"]),
            bin["pairs"],
        )
        for bin in reward["calibration"]
    ]


def draw_costs(path, runs):
    """Time and memory of each job."""
    panels = {"time (s)": "seconds", "peak memory (MB)": "peak_memory_mb"}
    draw_bars(
        path,
        {
            shown: {job.removeprefix("output/"): run and run[key] for job, run in runs.items()}
            for shown, key in panels.items()
        },
    )


def throughput(job, stages):
    """Panels of how fast each training went, step by step, as far as its log is there."""
    panels = {}
    for stage in stages:
        rule = f"train_{stage}"
        times = Path("output/logs", rule, job.inputs[rule].name, "times.jsonl")
        lines = times.read_text().splitlines() if times.exists() else []
        # A training that was killed took some steps twice.
        steps = list({line["step"]: line for line in map(json.loads, lines)}.values())
        panels |= panels_of(steps, {"tokens_per_second": f"{stage} (tokens/s)"})
        if stage == "rlhf":
            parts = {part: points_of(steps, part) for part in ("generate", "score", "train")}
            panels["a step of rlhf (s)"] = {
                part: thinned(points) for part, points in parts.items() if points
            }
    return panels


def draw_lineage(path, jobs):
    """The jobs that the report was made from, each right of its inputs, with their specs."""
    columns = lineage_columns(jobs)
    places = {
        path: (column, (len(paths) - 1) / 2 - row)
        for column, paths in enumerate(columns)
        for row, path in enumerate(paths)
    }
    height = max(len(paths) for paths in columns)
    figure, panel = plt.subplots(figsize=(1.5 * len(columns), 1.1 * height), layout="constrained")
    style = {"boxstyle": "round", "facecolor": "white", "edgecolor": COLOURS[0]}
    boxes = {}
    for name, entry in jobs.items():
        text = f"{entry['rule']}\n{entry['name']}\n{entry['spec'][:12]}"
        written = panel.text(*places[name], text, fontsize=8, ha="center", va="center", bbox=style)
        boxes[name] = written.get_bbox_patch()
    for name in jobs:
        for upstream in direct_inputs(jobs, name):
            arrow = {"arrowstyle": "->", "color": "grey"}
            arrow |= {"patchA": boxes[upstream], "patchB": boxes[name]}
            ends = {"xy": places[name], "xytext": places[upstream]}
            panel.annotate("", **ends, arrowprops=arrow, zorder=0)
    panel.set(xlim=(-0.6, len(columns) - 0.4), ylim=(-height / 2, height / 2))
    panel.axis("off")
    save(figure, path)


def report_data(job):
    """What became of the rows of each phase, how long they are, and what each dataset is like."""
    stats = {
        name: json.loads((folder / "stats.json").read_text())
        for name, folder in job.inputs.items()
        if name.partition(".")[0] in ("records", "rows", "tokens")
    }
    with open(job.result / "data.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["dataset or phase", "step", "figure", "value"])
        for name, facts in stats.items():
            step, _, of = name.partition(".")
            table.writerows([of, step, key, f"{value:.10g}"] for key, value in flat(facts))
    figure, panels = panels_for(3)
    tokens = {
        stage: stats[f"tokens.{stage}"]["train"] for stage in STAGES if f"tokens.{stage}" in stats
    }
    draw_rows(panels[0], tokens)
    draw_lengths(panels[1], tokens)
    draw_shares(panels[2], stats)
    save(figure, job.result / "data.svg")


def draw_rows(panel, tokens):
    """Rows to train on, by phase: kept whole, cut, and dropped by reason."""
    reasons = sorted({reason for facts in tokens.values() for reason in facts["dropped"]})
    for place, facts in enumerate(tokens.values()):
        shares = {"whole": facts["rows"] - facts["cut"], "cut": facts["cut"], **facts["dropped"]}
        left = 0
        for colour, what in enumerate(["whole", "cut", *reasons]):
            label = what if place == 0 else None
            width = shares.get(what, 0)
            panel.barh(place, width, left=left, color=COLOURS[colour % 8], label=label)
            left += width
    panel.set_yticks(range(len(tokens)), tokens)
    panel.set(xlabel="rows to train on")
    panel.set_xlim(0, 1.05 * panel.dataLim.x1)
    panel.invert_yaxis()
    panel.legend(fontsize="small", loc="lower left", bbox_to_anchor=(0, 1))


def draw_lengths(panel, tokens):
    """Lengths in tokens: median, 10 to 90 % as a box, 1 to 99 % as whiskers."""
    boxes = [
        {
            "label": f"{stage} {name}",
            "med": lengths["p50"],
            "q1": lengths["p10"],
            "q3": lengths["p90"],
            "whislo": lengths["p1"],
            "whishi": lengths["p99"],
        }
        for stage, facts in tokens.items()
        for name, lengths in facts["tokens"].items()
    ]
    line = {"color": COLOURS[0]}
    styles = dict.fromkeys(["boxprops", "medianprops", "whiskerprops", "capprops"], line)
    panel.bxp(boxes, orientation="horizontal", showfliers=False, **styles)
    panel.set(xlabel="length (tokens; p1, p10, p50, p90, p99)")
    panel.invert_yaxis()
    panel.grid(alpha=0.3)


def draw_shares(panel, stats):
    """Of each dataset's rows: repeated prompts, chosen longer, prompts in more phases than one."""
    names = [name.partition(".")[2] for name in stats if name.startswith("records.")]
    for place, name in enumerate(names):
        records = stats[f"records.{name}"]["train"]
        parts = stats[f"rows.{name}"].values()
        # The largest overlap of each part of a phase with any other one.
        shared = sum(max(part.get("rows_whose_prompt_is_in", {"": 0}).values()) for part in parts)
        shares = {
            "prompt repeated": records["repeated_prompts"] / records["rows"],
            "prompt in another phase too": shared / max(sum(part["rows"] for part in parts), 1),
            "chosen response is the longer one": records.get("chosen_longer_share", 0),
        }
        for offset, (what, share) in enumerate(shares.items()):
            label = what if place == 0 else None
            panel.barh(place + 0.25 * offset, share, 0.22, color=COLOURS[offset], label=label)
    panel.set_yticks([place + 0.25 for place in range(len(names))], names)
    panel.set(xlabel="share of rows", xlim=(0, 1))
    panel.invert_yaxis()
    panel.legend(fontsize="small", loc="lower left", bbox_to_anchor=(0, 1))


def flat(figures, prefix=""):
    """(name, number) of each figure of nested dicts and lists, names joined by dots."""
    items = figures.items() if isinstance(figures, dict) else enumerate(figures)
    for key, value in items:
        if isinstance(value, (dict, list)):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


if __name__ == "__main__":
    run(main)
