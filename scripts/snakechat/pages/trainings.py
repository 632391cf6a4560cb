"""Trainings: what they and their evaluations wrote, their curves and their throughput.

A training may be the log of one by DeepSpeed-Chat. Curves are SVG elements of a page: the same data
gives the same bytes, and text is text, in the fonts of the browser.
"""

import io
import json
import re
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.style
import numpy as np
import yaml
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from snakechat.estimates.flops import flops_per_token, peak_flops
from snakechat.pages.metrics import (
    NAMES,
    STAGES,
    TABLES,
    format_number,
    is_fraction,
    name_of,
    rebuild_command,
    run_value,
    translate,
)
from snakechat.pages.page import TEMPLATES, Table, value_table
from snakechat.workflow.errors import InputError
from snakechat.workflow.links import read_version_file
from snakechat.workflow.manifest import read_run_record

# What DeepSpeed-Chat's mains print: an evaluation before training and after each epoch, in step 3
# the mean reward of each batch. Measurements are DeepSpeed's own.
PRINTED = yaml.safe_load(
    (TABLES / "deepspeed_chat.yaml")
    .read_text("utf-8")
    .replace("NUMBER", r"(-?\d+(?:[.]\d*)?(?:e[+-]?\d+)?|-?inf|nan)")
)
# What a training has of all measurements that a log has.
MEASURED: dict[str, Callable[[list[float]], float]] = {
    "rows_per_second": lambda rates: rates[-1],
    "seconds_per_step": statistics.median,
    "peak_gpu_memory_mb": lambda peaks: 1024 * peaks[-1],
}
# Points of a line: more are averaged.
MAX_POINTS = 60
matplotlib.style.use(TEMPLATES / "plots.mplstyle")
# Browsers draw Chinese labels in their own fonts.
warnings.filterwarnings("ignore", message="Glyph .* missing from font")

# (step, value); several of a step are of several seeds.
Points = Sequence[tuple[float, float]]


class Training(NamedTuple):
    """A training with its evaluation.

    Attributes:
        stage: sft, reward, dpo or rlhf.
        name: Its path; in a comparison, the name of the recipe.
        settings, facts: What the lineage has of it; empty for a training log of another program.
        steps: The lines of metrics.jsonl.
        metrics: metrics.json of the evaluation.
        run: run.json; empty if it is unknown.
        tokens: stats.json of the tokens. Reports have it.
        compared: Settings, without the seed, in which trainings may differ. Comparisons have them.
    """

    stage: str
    name: str
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    metrics: Mapping[str, Any]
    run: Mapping[str, Any]
    tokens: Mapping[str, Any] = {}
    compared: Mapping[str, Any] = {}

    def curve_labels(self) -> dict[str, str]:
        """Return the labels of the metrics of its curves, by their keys in metrics.jsonl.

        A user's command has metrics of its own, which our trainings of the stage do not have.
        """
        group = STAGES[self.stage]["curves"]
        labels = {key: name_of(group, key) for key in NAMES[group]}
        if "command" in self.settings:
            found = (key.removeprefix("eval_") for line in self.steps for key in line)
            labels |= {key: labels.get(key, key) for key in found if key != "step"}
        return labels


def read_training(
    stage: str,
    name: str,
    entry: Mapping[str, Any],
    folder: str | Path,
    evaluation: str | Path,
    tokens: Path | None = None,
) -> Training:
    """Read a training, its evaluation and its tokens from their folders.

    entry: Of the training in the lineage.

    Metrics of a reward model or DPO have `before` if it was evaluated before its training.

    Raises:
        InputError: A file is missing or damaged.
    """
    steps = [*map(json.loads, io.StringIO(read_version_file(folder, "metrics.jsonl")))]
    metrics = json.loads(read_version_file(evaluation, "metrics.json"))
    if {"accuracy", "auc"} & metrics.keys() and steps and steps[0]["step"] == 0:
        metrics["before"] = {
            key.removeprefix("eval_"): value
            for key, value in steps[0].items()
            if key.startswith("eval_")
        }
    run = read_run_record(folder, entry) or {}
    stats = json.loads((tokens / "stats.json").read_text()) if tokens else {}
    return Training(stage, name, entry["settings"], entry["facts"], steps, metrics, run, stats)


def read_log(path: Path, name: str, stage: str) -> Training:
    """Return what a log of DeepSpeed-Chat, with a name in `logs`, has of a training.

    Raises:
        InputError: It has no evaluation of this stage.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    printed = PRINTED | PRINTED[stage]
    found = []
    for match in re.finditer(printed["evaluation"], text):
        numbers = zip(printed["names"], match.groups(), strict=True)
        found.append({key: float(number) for key, number in numbers if number})
    if not found:
        stages = (each for each in STAGES if re.search(PRINTED[each]["evaluation"], text))
        raise InputError(
            f"logs.{name}: {path} is a log of {next(stages, 'another program')}: expected one of"
            f" DeepSpeed-Chat's {stage}"
        )
    measured = {key: [*map(float, re.findall(printed[key], text))] for key in MEASURED}
    run = {key: MEASURED[key](values) for key, values in measured.items() if values}
    if stage == "rlhf":
        steps = [{"step": step, **values} for step, values in enumerate(found, 1)]
        return Training(stage, name, {}, {}, steps, {}, run)
    # A training that has ended early has no evaluation after it.
    last = found[-1] if len(found) > 1 else {}
    metrics = {"before": found[0], **({"after": last} if stage == "sft" else last)}
    return Training(stage, name, {}, {}, [], metrics, run)


def run_table(training: Training) -> Table:
    """Return the table of the run of a training, which is known."""
    run, steps = training.run, training.steps
    prefix = "policy/" if training.stage == "rlhf" else ""
    last = steps[-1] if steps else {}
    measured = {
        "command": rebuild_command(training.name, run),
        **training.facts,
        **run,
        **{key: last.get(f"{prefix}{key}") for key in ("skipped_steps", "loss_scale")},
    }
    for name, key in {"losses": f"{prefix}loss", "value_losses": "value/loss"}.items():
        if losses := [step[key] for step in steps if step.get(key) is not None]:
            means = losses[0], losses[-1], statistics.fmean(losses)
            measured[name] = ", ".join(map(format_number, means))
    if "seconds_per_step" in run:
        measured |= throughput(training)
    shown = {
        name_of("run", key): run_value(key, measured[key])
        for key in NAMES["run"]
        if measured.get(key) is not None
    }
    return value_table(translate("run"), shown, translate("run_note"))


def throughput(training: Training) -> dict[str, float | None]:
    """Return the throughput of all processes of a training together, on a step of median length.

    Rows are pairs in DPO and prompts in RLHF. `utilization` is the share of the GPUs' peak rate
    (MFU), None if it is unknown.
    """
    settings, run, train = training.settings, training.run, training.tokens["train"]
    # Mean tokens of the prompt, and of all responses of a row, which share a prompt and do not
    # attend to each other.
    lengths = {name: tokens["sum"] / train["rows"] for name, tokens in train["tokens"].items()}
    prompt, responses, count = lengths.pop("prompt"), sum(lengths.values()), len(lengths)
    if training.stage == "rlhf":
        # An evaluation before training (step 0) has no responses of a step.
        sampled = [step["response/length"] for step in training.steps if "response/length" in step]
        count = settings["num_generations"]
        responses = count * statistics.fmean(sampled)
    # In RLHF, the actor generates and evaluates each token, the reference evaluates it, reward
    # model and critic score it. A reward model only counts with a critic, at the critic's size.
    forwards = {"model": 0, "actor": 2 if run.get("evaluated_in_update") else 3, "critic": 2}
    passes = [
        (model, forwards[name], settings.get("ppo_epochs", 1))
        for name, model in run["models"].items()
    ]
    batch = settings.get("rollout_batch_size", settings["global_batch_size"])
    rows = min(batch, train["rows"]) / run["seconds_per_step"]
    tokens = rows * (prompt + responses)
    flops = tokens * flops_per_token(passes, prompt + responses / count)
    gpus = run["placement"]["nodes"] * run["placement"]["gpus_per_node"]
    peak = peak_flops(run.get("gpu", "")) if settings["dtype"] != "fp32" else None
    return {
        "rows_per_second": rows,
        "tokens_per_second": tokens,
        "flops_per_second": flops,
        "utilization": flops / (gpus * peak) if peak else None,
    }


# --- curves ---------------------------------------------------------------------------------------


def curves(
    labels: Mapping[str, str], lines: Mapping[str, Callable[[str], Points]]
) -> dict[str, Markup]:
    """Return a figure of each metric that a line has, by its label.

    lines: By name, functions that return the points of the metric with a key, none without it.
    """
    figures = {}
    for key, label in labels.items():
        points = {name: points_at(key) for name, points_at in lines.items()}
        if any(points.values()):
            figures[label] = draw_lines(label, points, is_fraction(key))
    return figures


def points_of(steps: Sequence[Mapping[str, Any]], key: str) -> Points:
    """Return (step, value) of a metric, from the lines of metrics.jsonl that have a number of it.

    Commands of users may write nulls and texts.
    """
    return [(line["step"], line[key]) for line in steps if isinstance(line.get(key), int | float)]


def averaged(points: Points) -> np.ndarray:
    """Return (step, mean, minimum, maximum) of neighbouring steps and all seeds.

    The shape is [n, 4] with at most MAX_POINTS rows.
    """
    steps, values = np.array(sorted(points), float).T
    rows = []
    for part in np.array_split(np.unique(steps), min(len(set(steps)), MAX_POINTS)):
        found = values[(part[0] <= steps) & (steps <= part[-1])]
        rows.append((part.mean(), found.mean(), found.min(), found.max()))
    return np.array(rows)


def draw_lines(title: str, lines: Mapping[str, Points], percent: bool = False) -> Markup:
    """Plot lines over steps: means, and bands from the lowest to the highest value.

    A line without points has no entry in the legend, and the others keep their colours. The ids in
    figures of different titles differ. percent: Whether the values are fractions.
    """
    # Text has the size of the page's on a phone.
    figure = Figure(figsize=(4.4, 2.7), layout="constrained")
    axes = figure.subplots()
    for name, points in lines.items():
        steps, means, lows, highs = averaged(points).T if points else np.empty((4, 0))
        marker = "." if len(steps) < MAX_POINTS else ""
        [line] = axes.plot(steps, means, marker=marker, label=name if points else None)
        axes.fill_between(steps, lows, highs, color=line.get_color(), alpha=0.18, lw=0)
    axes.set(xlabel=translate("step"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    if len(lines) > 1:
        axes.legend()
    file = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": title}):
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    # Without the declarations before it, which HTML does not have.
    _, tag, svg = file.getvalue().partition("<svg")
    return Markup(tag + svg)
