"""Draw the curves and write the tables of a recipe's three stages."""

import csv
import json

from rlhf.job import run
from rlhf.lineage import direct_inputs, in_columns
from rlhf.pictures import COLOURS, draw_curves, panels_of, plt

CURVES = {
    "sft": {"loss": "loss (nats per token)", "learning_rate": "learning rate"},
    "reward": {"loss": "loss (nats per pair)", "accuracy": "accuracy (share)"},
    "rlhf": {
        "objective/scores": "score",
        "objective/kl": "KL to SFT (nats per answer)",
        "response/length": "answer length (tokens)",
        "objective/entropy": "entropy (nats per token)",
    },
}


def main(job):
    """Figures of the lineage, of the data and of each stage; the tables have the numbers."""
    draw_lineage(job.result / "lineage.svg", job.lineage)
    report_data(job)
    # Where functions alone score, there is no reward model.
    stages = [stage for stage in CURVES if f"train_{stage}" in job.inputs]
    for stage in stages:
        lines = (job.inputs[f"train_{stage}"] / "metrics.jsonl").read_text().splitlines()
        panels = panels_of([json.loads(line) for line in lines], CURVES[stage])
        draw_curves(job.result / f"{stage}.svg", panels)
    with open(job.result / "figures.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["stage", "figure", "value"])
        for stage in stages:
            figures = json.loads((job.inputs[f"evaluate_{stage}"] / "metrics.json").read_text())
            table.writerows([stage, name, f"{value:.10g}"] for name, value in flat(figures))


def draw_lineage(path, jobs):
    """The jobs that the report was made from, each right of its inputs, with their specs."""
    columns = in_columns(jobs)
    places = {
        path: (column, (len(paths) - 1) / 2 - row)
        for column, paths in enumerate(columns)
        for row, path in enumerate(paths)
    }
    height = max(len(paths) for paths in columns)
    figure, panel = plt.subplots(figsize=(1.7 * len(columns), 0.9 * height), layout="constrained")
    style = {"boxstyle": "round", "facecolor": "white", "edgecolor": COLOURS[0]}
    boxes = {}
    for name, entry in jobs.items():
        text = f"{entry['rule']}\n{entry['name']}\n{entry['spec'][:12]}"
        written = panel.text(*places[name], text, fontsize=8, ha="center", va="center", bbox=style)
        boxes[name] = written.get_bbox_patch()
    for name in jobs:
        for upstream in direct_inputs(jobs, name):
            arrow = {"arrowstyle": "->", "color": COLOURS[1]}
            arrow |= {"patchA": boxes[upstream], "patchB": boxes[name]}
            ends = {"xy": places[name], "xytext": places[upstream]}
            panel.annotate("", **ends, arrowprops=arrow, zorder=0)
    panel.set(xlim=(-0.6, len(columns) - 0.4), ylim=(-height / 2, height / 2))
    panel.axis("off")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


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
    figure, panels = plt.subplots(1, 3, figsize=(13, 3.4), layout="constrained")
    tokens = {
        stage: stats[f"tokens.{stage}"]["train"] for stage in CURVES if f"tokens.{stage}" in stats
    }
    draw_rows(panels[0], tokens)
    draw_lengths(panels[1], tokens)
    draw_shares(panels[2], stats)
    figure.savefig(job.result / "data.svg", metadata={"Date": None})
    plt.close(figure)


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
    panel.invert_yaxis()
    panel.legend(fontsize="x-small")


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
            "chosen answer is the longer one": records.get("chosen_longer_share", 0),
        }
        for offset, (what, share) in enumerate(shares.items()):
            label = what if place == 0 else None
            panel.barh(place + 0.25 * offset, share, 0.22, color=COLOURS[offset], label=label)
    panel.set_yticks([place + 0.25 for place in range(len(names))], names)
    panel.set(xlabel="share of rows", xlim=(0, 1))
    panel.invert_yaxis()
    panel.legend(fontsize="x-small")


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
