"""The jobs behind a result: their data, sources, costs and throughput, as sections of a page.

A training may be the log of one by DeepSpeed-Chat.
"""

import io
import json
import re
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from snakechat.estimates.flops import flops_per_token, peak_flops
from snakechat.pages.metrics import (
    NAMES,
    STAGES,
    TABLES,
    format_duration,
    format_number,
    format_share,
    name_of,
    run_value,
    translate,
)
from snakechat.pages.page import Section, Table, table_of, value_table
from snakechat.workflow.errors import InputError
from snakechat.workflow.links import read_version_file
from snakechat.workflow.manifest import Lineage, read_run_record

Statistics = Mapping[str, Any]
Runs = dict[str, dict[str, Any] | None]
QUANTILES = {key: key for key in ("p1", "p10", "p50", "p90", "p99")}
# The rules whose results come from outside of the build, unless they generate them.
SOURCE_RULES = ("import_dataset", "fetch_model")
# What the table of costs shows of run.json.
COSTS = ("started", "seconds", "peak_memory_mb", "peak_gpu_memory_mb")
# What DeepSpeed-Chat's mains print: an evaluation before training and after each epoch, in step 3
# the mean reward of each batch. Measurements are DeepSpeed's own.
NUMBER = r"(-?\d+(?:[.]\d*)?(?:e[+-]?\d+)?|-?inf|nan)"
PRINTED = yaml.safe_load(
    (TABLES / "deepspeed_chat.yaml").read_text("utf-8").replace("NUMBER", NUMBER)
)
# What a training has of all measurements that a log has.
MEASURED: dict[str, Callable[[list[float]], float]] = {
    "rows_per_second": lambda rates: rates[-1],
    "seconds_per_step": statistics.median,
    "peak_gpu_memory_mb": lambda peaks: 1024 * peaks[-1],
}


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

    @property
    def title(self) -> str:
        """The stage as people know it."""
        return name_of("stages", self.stage)


def read_training(
    stage: str, name: str, entry: Mapping[str, Any], folder: str | Path, evaluation: str | Path
) -> Training:
    """Read a training and its evaluation.

    Args:
        entry: Of the training, in the lineage.
        folder, evaluation: The folders of their results.

    Raises:
        InputError: A file is missing or damaged.
    """
    lines = [*map(json.loads, io.StringIO(read_version_file(folder, "metrics.jsonl")))]
    metrics = with_metrics_before(json.loads(read_version_file(evaluation, "metrics.json")), lines)
    run = read_run_record(folder, entry) or {}
    return Training(stage, name, entry["settings"], entry["facts"], lines, metrics, run)


def with_metrics_before(
    metrics: dict[str, Any], steps: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return metrics.json with the evaluation before a reward model or DPO, if it had one.

    steps: The lines of metrics.jsonl.
    """
    if not {"accuracy", "auc"} & metrics.keys() or not steps or steps[0]["step"] > 0:
        return metrics
    line = steps[0].items()
    before = {key.removeprefix("eval_"): value for key, value in line if key.startswith("eval_")}
    return {**metrics, "before": before}


def read_log(path: Path, name: str, stage: str) -> Training:
    """Return what a log of DeepSpeed-Chat has of a training.

    Args:
        path: The log.
        name: Its name in `logs`.
        stage: sft, reward, dpo or rlhf.

    Raises:
        InputError: It has no evaluation of this stage.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    printed = PRINTED | PRINTED[stage]
    found = [
        {
            name: float(value)
            for name, value in zip(printed["names"], match.groups(), strict=True)
            if value
        }
        for match in re.finditer(printed["evaluation"], text)
    ]
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


def row_section(trainings: Sequence[Training], datasets: Mapping[str, Statistics]) -> Section:
    """Return the section of the rows of each dataset and phase, and of their lengths.

    datasets: stats.json of the datasets, by name.
    """
    columns = {"mean": translate("mean"), **QUANTILES, "p100": translate("maximum")}
    repeated: dict[str, dict[str, Any]] = {}
    counts: dict[str, dict[str, int]] = {}
    lengths: dict[str, dict[str, float]] = {}
    for name, of in datasets.items():
        rows, prompts = (of["train"][key] for key in ("rows", "repeated_prompts"))
        share = {translate("repeated_prompts"): format_share(prompts / rows)}
        repeated[name] = {translate("rows"): rows} | share
    for training in trainings:
        for split, of in training.tokens.items():
            name = f"{training.stage}.{split}"
            counts[name] = {translate("rows"): of["rows"]} | {
                f"{translate(kind)}: {what}": number
                for kind in ("truncated", "dropped")
                for what, number in of[kind].items()
            }
            for what, found in of["tokens"].items():
                lengths[f"{name}: {what}"] = {head: found[key] for key, head in columns.items()}
    tables = [
        table_of(translate("datasets"), repeated),
        table_of(translate("phases"), counts),
        table_of(translate("lengths"), lengths),
    ]
    return Section(translate("rows_and_prompts"), tables=tables)


def job_section(lineage: Lineage, licenses: Mapping[str, str | None], runs: Runs) -> Section:
    """Return the table of the jobs that a report was made from, each below its inputs.

    Args:
        licenses: The licences of the sources, by path.
        runs: run.json of each job, by path; None if it is unknown.
    """
    rows = {}
    for path, run in runs.items():
        job = lineage[path]
        rows[path.removeprefix("output/")] = {
            translate("inputs"): ", ".join(each.removeprefix("output/") for each in job["inputs"]),
            translate("source"): describe_origin(job, licenses.get(path)),
            translate("spec"): job["spec"][:16],
            # The changes after which a result was accepted (scripts/accept.py).
            translate("accepted"): ", ".join(
                f"{entry['date']}: {entry['because']} ({'; '.join(entry['changes'])})"
                for entry in job.get("accepted", ())
            ),
            **{name_of("run", key): run_value(key, run.get(key)) if run else "?" for key in COSTS},
        }
    rows[translate("total_time")] = {name_of("run", "seconds"): total_cost(runs)}
    table = table_of("", rows, translate("jobs_note"), translate("job"))
    return Section(translate("jobs"), tables=[table._replace(has_texts=True)])


def describe_origin(entry: Mapping[str, Any], license: str | None = None) -> str:
    """Describe the external source of a job in the lineage, or the parameters that generated it.

    Returns "" if all inputs of the job are jobs.

    license: Licence of the source. It is appended if given.
    """
    settings, files = entry["settings"], entry["files"]
    if "hub" in settings:
        # The commit, because a revision may be a branch.
        origin = f"{settings['hub']} @ {entry['facts'].get('commit', settings['revision'])}"
    elif files["number"]:
        origin = translate("files", number=files["number"], digest=files["digest"][:16])
    elif "generate" in settings:
        origin = translate("generated", generator=settings["generate"], seed=settings["seed"])
    elif "init" in settings:
        origin = translate("random_weights", seed=settings["seed"])
    else:
        return ""
    return origin + (translate("licence", license=license) if license else "")


def source_licenses(lineage: Lineage, declared: Mapping[str, str]) -> dict[str, str | None]:
    """Return the licence of each external dataset and model of a lineage, by path.

    declared: Licences that the config declares, by path; the others are those that were recorded.
    """
    return {
        path: declared.get(path) or entry["facts"].get("licence")
        for path, entry in lineage.items()
        if entry["rule"] in SOURCE_RULES and "generate" not in entry["settings"]
    }


def total_cost(runs: Runs) -> str:
    """Return the time of all jobs together."""
    return format_duration(sum(run["seconds"] for run in runs.values() if run))


def run_table(training: Training) -> Table:
    """Return the table of the run of a training, which is known."""
    run, steps = training.run, training.steps
    prefix = "policy/" if training.stage == "rlhf" else ""
    last = steps[-1] if steps else {}
    measured = {"command": rebuild_command(training.name, run), **training.facts, **run}
    measured |= {key: last.get(f"{prefix}{key}") for key in ("skipped_steps", "loss_scale")}
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


def rebuild_command(path: str, run: Mapping[str, Any]) -> str:
    """Return the command that builds a result as its run did."""
    options = shlex.join(run["options"].get("snakemake", ()))
    return f"snakemake --cores 1 {path} {options}".rstrip()


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
    in_update = run.get("evaluated_in_update", False)
    forwards = {"model": 0, "actor": 2 if in_update else 3, "critic": 2}
    epochs = settings.get("ppo_epochs", 1)
    passes = [(model, forwards[name], epochs) for name, model in run["models"].items()]
    batch = settings.get("rollout_batch_size", settings["global_batch_size"])
    rows = min(batch, train["rows"]) / run["seconds_per_step"]
    tokens = rows * (prompt + responses)
    flops = tokens * flops_per_token(passes, prompt + responses / count)
    placement = run["placement"]
    peak = peak_flops(run.get("gpu", "")) if settings["dtype"] != "fp32" else None
    gpus = placement["nodes"] * placement["gpus_per_node"]
    return {
        "rows_per_second": rows,
        "tokens_per_second": tokens,
        "flops_per_second": flops,
        "utilization": flops / (gpus * peak) if peak else None,
    }
