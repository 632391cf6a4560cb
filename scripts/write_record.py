"""Write a training record: a page of Markdown about one training, with its curves.

It contains times, memory and the machine (NAME.run.json), which differ between two builds.
"""

import json
from collections.abc import Iterator
from typing import Any

from snakechat.evaluation.comparisons import initial_model
from snakechat.planning.flops import peak_flops
from snakechat.reporting.formatting import format_duration, format_estimate, format_number
from snakechat.reporting.labels import (
    CURVES,
    MODELS,
    N_,
    PAIRS,
    PERPLEXITIES,
    RESPONSES,
    TRAINED_MODELS,
    WIN_RATES,
)
from snakechat.reporting.pages import write_page
from snakechat.reporting.plots import curve_panels, draw_curves
from snakechat.reporting.training_summary import TrainingSummary
from snakechat.reporting.translations import Translate, translator
from snakechat.workflow.job import Job, run

# Sections of a step of RLHF, as the trainer times them.
SECTIONS = {
    "generate": N_("generating responses"),
    "score": N_("scoring responses"),
    "train": N_("updating the models"),
}
# Rows of the table of steps.
MAX_STEPS = 10

Row = list[Any]
# Head (possibly empty) and rows.
Table = tuple[list[str], list[Row]]


def main(job: Job[Any]) -> None:
    """Write the page and the plot that it shows."""
    translate = translator(job.settings.language)
    training = TrainingSummary(job)
    curves = {key: translate(label) for key, label in CURVES[training.stage].items()}
    panels = curve_panels(training.steps, curves, translate("held-out rows"))
    draw_curves(job.result / "loss.svg", panels, translate("step"), text_as_text=True)
    write_page(
        job.result / "record.md",
        "training_record.md",
        _=translate,
        training=training,
        path=str(job.inputs["training"]),
        started=training.run["started"][:16],
        spec=training.run["spec"][:16],
        results=RESULTS[training.stage](training.metrics, translate),
        run=list(run_rows(training, translate)),
        data=list(data_rows(training, translate)),
        models=model_table(training.models, translate),
        steps=step_table(training.steps, curves, translate),
        settings=setting_rows(training.settings),
        placement=setting_rows(
            {
                key: value
                for key, value in training.run["placement"].items()
                if not key.startswith("cache")
            }
        ),
        environment=list(environment_rows(training.run, translate)),
    )


# --- results ----------------------------------------------------------------------------------


def sft_results(metrics: dict[str, Any], translate: Translate) -> Table:
    """Return the table of perplexities on held-out rows."""
    before, after = metrics["before"], metrics["after"]
    head = translate("held-out rows: {count}", count=format_number(metrics["rows"]))
    rows = [[translate(label), before[key], after[key]] for key, label in PERPLEXITIES.items()]
    return [head, translate("before training"), translate("after training")], rows


def pair_results(metrics: dict[str, Any], translate: Translate) -> Table:
    """Return the table of a reward model's scores, or of a DPO model's implicit rewards."""
    rows = [[translate(label), metrics[key]] for key, label in PAIRS.items()]
    rows += [
        [translate("accuracy on {dataset}", dataset=dataset), of["accuracy"]]
        for dataset, of in metrics.get("by_dataset", {}).items()
    ]
    head = translate("held-out pairs: {count}", count=format_number(metrics["pairs"]))
    return [head, translate("after training")], rows


def rlhf_results(metrics: dict[str, Any], translate: Translate) -> Table:
    """Return the table of responses to held-out prompts, with a column per model."""
    evaluated = metrics["intervals_95"]
    others = [model for model in evaluated if model not in MODELS]
    models: list[str] = [model for model in MODELS if model in evaluated] + others
    rows = [
        [
            translate(label),
            *(metrics[model][key] for model in models),
            format_estimate(metrics.get(f"{key}_difference")),
        ]
        for key, label in RESPONSES.items()
        if key in metrics["rlhf"]
    ]
    initial = initial_model(metrics)
    for key, label in WIN_RATES[initial].items():
        if key in metrics["wins"]["rlhf"][initial]:
            won = [metrics["wins"].get(model, {}).get(initial, {}).get(key) for model in models]
            rows.append([translate(label), *map(format_estimate, won), ""])
    head = translate("held-out prompts: {count}", count=format_number(metrics["num_prompts"]))
    labels = [MODELS.get(model, model) for model in models]
    difference = translate("RLHF - {initial} (95 % interval)", initial=MODELS[initial])
    return [head, *labels, difference], rows


RESULTS = {"sft": sft_results, "reward": pair_results, "dpo": pair_results, "rlhf": rlhf_results}


# --- run, data and models ---------------------------------------------------------------------


def run_rows(training: TrainingSummary, translate: Translate) -> Iterator[Row]:
    """Yield rows of times, throughput and memory."""
    run = training.run
    yield [translate("steps"), run["steps"]]
    if run["resumed_after_step"]:
        yield [
            translate("resumed after step (times and memory count from there)"),
            run["resumed_after_step"],
        ]
    yield [translate("total time"), format_duration(run["seconds"])]
    yield [translate("time for saving checkpoints"), format_duration(run["saving_seconds"])]
    if "seconds_per_step" in run:
        yield from throughput_rows(training, translate)
    yield [translate("peak memory of the first process (MB)"), run["peak_memory_mb"]]
    if "gpu" in run:
        yield [translate("peak memory of its GPU (MB)"), run["peak_gpu_memory_mb"]]
    # The two optimizers of RLHF skip steps independently.
    if training.settings["dtype"] == "fp16" and training.stage != "rlhf":
        yield [translate("steps skipped for fp16 overflow"), training.skipped_steps]


def throughput_rows(training: TrainingSummary, translate: Translate) -> Iterator[Row]:
    """Yield rows of the throughput of a step of median length."""
    rows = training.rows_per_second
    flops = rows * training.tokens_per_row * training.flops_per_token
    yield [translate("seconds per step (median)"), training.run["seconds_per_step"]]
    for section, label in SECTIONS.items():
        if "seconds_by_section" in training.run:
            seconds = training.run["seconds_by_section"][section]
            yield [translate("seconds for {section}", section=translate(label)), seconds]
    label = N_("prompts per second") if training.stage == "rlhf" else N_("rows per second")
    yield [translate(label), rows]
    yield [translate("tokens per second"), rows * training.tokens_per_row]
    yield [translate("TFLOP/s, all processes"), flops / 1e12]
    peak = peak_flops(training.run.get("gpu", ""))
    if peak and training.settings["dtype"] != "fp32":
        label = translate("model FLOPs utilization (MFU)")
        yield [label, flops / (training.num_processes * peak)]


def data_rows(training: TrainingSummary, translate: Translate) -> Iterator[Row]:
    """Yield rows of the data and of how it is split into steps."""
    settings, data = training.settings, training.data
    for split, label in (("train", N_("training rows")), ("eval", N_("held-out rows"))):
        rows = translate(label)
        yield [rows, data[split]["rows"]]
        yield [translate("{rows}: truncated", rows=rows), data[split]["truncated"]]
        yield [translate("{rows}: dropped", rows=rows), sum(data[split]["dropped"].values())]
        for name, lengths in data[split]["tokens"].items():
            yield [translate("{rows}: tokens ({column})", rows=rows, column=name), lengths["sum"]]
    yield [translate("datasets"), ", ".join(name for name, _ in settings["datasets"])]
    yield [translate("rows per step"), training.batch_size]
    yield [translate("steps per epoch"), training.steps_per_epoch]
    yield [translate("epochs"), settings["epochs"]]
    yield [translate("planned steps"), training.planned_steps]
    yield [translate("mean tokens per row"), training.tokens_per_row]
    label = translate("tokens per micro-batch, at most")
    yield [label, training.run["placement"]["micro_batch_tokens"]]
    yield [translate("processes"), training.num_processes]
    if any("tokens" in line for line in training.steps):
        tokens = sum(line.get("tokens", 0) for line in training.steps)
        yield [translate("tokens trained on"), tokens]


def model_table(models: dict[str, dict[str, int]], translate: Translate) -> Table:
    """Return the table of the sizes of the trained models."""
    labels = {
        "weights": N_("parameters"),
        "trained": N_("trainable"),
        "layers": N_("layers"),
        "hidden_size": N_("hidden size"),
    }
    rows = [
        [translate(TRAINED_MODELS[name]), *(size[key] for key in labels)]
        for name, size in models.items()
    ]
    return ["", *map(translate, labels.values())], rows


def step_table(steps: list[dict[str, Any]], curves: dict[str, str], translate: Translate) -> Table:
    """Return the table of about ten steps, including the first and the last one."""
    complete = [line for line in steps if all(key in line for key in curves)]
    last = len(complete) - 1
    places = sorted({round(number * last / (MAX_STEPS - 1)) for number in range(MAX_STEPS)})
    rows = [
        [complete[place]["step"], *(complete[place][key] for key in curves)] for place in places
    ]
    return [translate("step"), *curves.values()], rows


def setting_rows(settings: dict[str, Any]) -> list[Row]:
    """Return rows of settings, by their keys in the config."""
    return [[f"`{key}`", json.dumps(settings[key])] for key in sorted(settings)]


def environment_rows(run: dict[str, Any], translate: Translate) -> Iterator[Row]:
    """Yield rows of the machine and the software."""
    yield [translate("host"), run["host"]]
    yield [translate("operating system"), run["platform"]]
    yield ["CPU", run["cpu"]]
    yield [translate("cores"), run["cpus"]]
    if "gpu" in run:
        yield ["GPU", run["gpu"]]
    yield [translate("threads"), run["threads"]]
    yield ["Python", run["python"]]
    yield from map(list, sorted(run["versions"].items()))


if __name__ == "__main__":
    run(main)
