"""Write a training record: a page about one training, with its curves.

It contains times, memory and the machine (NAME.run.json), which differ between two builds.
"""

import json
from collections.abc import Iterator
from typing import Any

from snakechat.planning.flops import peak_flops
from snakechat.reporting.curves import curve_section
from snakechat.reporting.formatting import format_duration, format_memory
from snakechat.reporting.html_pages import write_sections
from snakechat.reporting.labels import CURVES, N_, TRAINED_MODELS
from snakechat.reporting.page_parts import Card, Section, Table
from snakechat.reporting.results import headline, result_sections
from snakechat.reporting.training_summary import TrainingSummary
from snakechat.reporting.translations import Translate, translator
from snakechat.workflow.job import Job, run

# Sections of a step of RLHF, as the trainer times them.
SECTIONS = {
    "generate": N_("generating responses"),
    "score": N_("scoring responses"),
    "train": N_("updating the models"),
}
# What a training used of an LLM judge.
JUDGE_USAGE = {
    "requests": N_("requests"),
    "cache_hits": N_("replies from the cache"),
    "prompt_tokens": N_("prompt tokens"),
    "completion_tokens": N_("completion tokens"),
    "cost": N_("cost"),
}
# Rows of the table of steps.
MAX_STEPS = 10

Row = list[Any]
# Head and rows.
Rows = tuple[list[str], list[Row]]


def main(job: Job[Any]) -> None:
    """Write the page."""
    translate = translator(job.settings.language)
    training = TrainingSummary(job)
    curves = CURVES[training.stage]
    run_table = Table("", [], list(run_rows(training, translate)))
    data_table = Table("", [], list(data_rows(training, translate)))
    placement = {
        key: value
        for key, value in training.run["placement"].items()
        if not key.startswith("cache")
    }
    folded = [
        Table(translate("Steps"), *step_table(training.steps, curves, translate)),
        Table(translate("Models"), *model_table(training.models, translate)),
        Table(translate("Settings"), [], setting_rows(training.settings)),
        Table(translate("Placement"), [], setting_rows(placement)),
        Table(translate("Environment"), [], list(environment_rows(training.run, translate))),
    ]
    write_sections(
        job.result / "record.html",
        job.settings.language,
        eyebrow=translate("Training record"),
        title=f"{training.stage}/{training.name}",
        subtitle=f"{training.run['started'][:16]} UTC, {job.inputs['training']}, spec"
        f" {training.run['spec'][:16]}",
        cards=[
            *headline(training.stage, training.metrics, translate),
            Card(translate("total time"), format_duration(training.run["seconds"])),
        ],
        sections=[
            curve_section(translate("Curves"), training.steps, curves, translate),
            *result_sections(training.stage, training.metrics, translate),
            Section(translate("Run"), shown_tables=[run_table]),
            Section(translate("Data and batches"), shown_tables=[data_table]),
            Section(translate("Steps, models, settings and environment"), tables=folded),
        ],
        notes=[
            translate(
                "Floating point operations are counted as in appendix B of the PaLM paper"
                " (Chowdhery et al. 2022): per token, 6 for each parameter (4 for a frozen one)"
                " and 12 · layers · hidden size · mean sequence length for attention. RLHF adds"
                " forward passes (2 for each parameter, and a third of the attention). Padding"
                " and recomputation in activation checkpointing do not count. Peak rates of GPUs"
                " are those of NVIDIA's data sheets for dense 16-bit operations. Rates are those"
                " of the median step, without saving, loading and evaluation."
            )
        ],
    )


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
    yield [translate("peak memory of the first process"), format_memory(run["peak_memory_mb"])]
    if "gpu" in run:
        yield [translate("peak memory of its GPU"), format_memory(run["peak_gpu_memory_mb"])]
    for judge, usage in run.get("llm_judges", {}).items():
        for key in (key for key in JUDGE_USAGE if key in usage):
            label = translate(
                "LLM judge {judge}: {quantity}", judge=judge, quantity=translate(JUDGE_USAGE[key])
            )
            yield [label, usage[key]]
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
        yield [translate("{rows}: truncated", rows=rows), sum(data[split]["truncated"].values())]
        for what, count in data[split]["truncated"].items():
            yield [f"{translate('{rows}: truncated', rows=rows)}: {what}", count]
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


def model_table(models: dict[str, dict[str, int]], translate: Translate) -> Rows:
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


def step_table(steps: list[dict[str, Any]], curves: dict[str, str], translate: Translate) -> Rows:
    """Return the table of about ten steps, including the first and the last one."""
    curves = {key: label for key, label in curves.items() if any(key in line for line in steps)}
    complete = [line for line in steps if all(key in line for key in curves)]
    last = len(complete) - 1
    places = sorted({round(number * last / (MAX_STEPS - 1)) for number in range(MAX_STEPS)})
    rows = [
        [str(complete[place]["step"]), *(complete[place][key] for key in curves)]
        for place in places
    ]
    return [translate("step"), *map(translate, curves.values())], rows


def setting_rows(settings: dict[str, Any]) -> list[Row]:
    """Return rows of settings, by their keys in the config."""
    return [[key, json.dumps(settings[key])] for key in sorted(settings)]


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
