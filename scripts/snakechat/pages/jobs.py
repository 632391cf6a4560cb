"""The jobs behind a result: their data, sources, costs and throughput, as sections of a page."""

import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from snakechat.estimates.flops import peak_flops, rlhf_flops, training_flops
from snakechat.pages.page import Section, Table, table_of, value_table
from snakechat.pages.texts import (
    NAMES,
    format_duration,
    format_number,
    format_share,
    name_of,
    run_value,
    translate,
)
from snakechat.workflow.manifest import Lineage, read_run_record, upstream_first

Statistics = Mapping[str, Any]
Runs = dict[str, dict[str, Any] | None]
QUANTILES = ("p1", "p10", "p50", "p90", "p99")
# What the table of costs shows of run.json.
COSTS = ("started", "seconds", "peak_memory_mb", "peak_gpu_memory_mb")
# What has tables of its own, or is the title of the page.
APART = ("spec", "placement", "versions", "options", "unchanged_because", "evaluated_in_update")


class Training(NamedTuple):
    """A training of a report, with its evaluation.

    Attributes:
        stage: sft, reward, dpo or rlhf.
        path: Path of the training.
        job: The training in the lineage.
        steps: The lines of metrics.jsonl.
        metrics: metrics.json of the evaluation.
        tokens: stats.json of the tokens.
        run: run.json; empty if it is unknown.
    """

    stage: str
    path: str
    job: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    metrics: Mapping[str, Any]
    tokens: Statistics
    run: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The stage as people know it."""
        return name_of("stages", self.stage)


def dataset_table(statistics: Mapping[str, Statistics]) -> Table:
    """Return the table of repeated prompts.

    statistics: stats.json of the datasets, by input name (records.DATASET).
    """
    trained = {name: of["train"] for name, of in statistics.items() if name.startswith("records.")}
    rows = {
        name.removeprefix("records."): {
            translate("rows"): of["rows"],
            translate("prompt of an earlier row"): format_share(
                of["repeated_prompts"] / of["rows"]
            ),
        }
        for name, of in trained.items()
    }
    return table_of(translate("datasets"), rows)


def row_section(trainings: Sequence[Training], statistics: Mapping[str, Statistics]) -> Section:
    """Return the section of the rows of each dataset and phase, and of their lengths.

    statistics: As of dataset_table.
    """
    splits = {f"{of.stage}.{split}": rows for of in trainings for split, rows in of.tokens.items()}
    counts = {
        name: {
            translate("rows"): of["rows"],
            **{f"{translate('truncated')}: {what}": n for what, n in of["truncated"].items()},
            **{f"{translate('dropped')}: {why}": n for why, n in of["dropped"].items()},
        }
        for name, of in splits.items()
    }
    lengths = {
        f"{name}: {what}": {
            translate("mean"): of["mean"],
            **{key: of[key] for key in QUANTILES},
            translate("maximum"): of["p100"],
        }
        for name, split in splits.items()
        for what, of in split["tokens"].items()
    }
    tables = [
        dataset_table(statistics),
        table_of(translate("phases"), counts),
        table_of(translate("lengths (tokens)"), lengths),
    ]
    return Section(translate("Rows and prompts"), tables=tables)


def job_section(lineage: Lineage, licenses: Mapping[str, str | None], runs: Runs) -> Section:
    """Return the table of the jobs that a report was made from, each below its inputs.

    licenses: The licences of the sources, by path.
    """
    rows = {}
    for path, run in runs.items():
        job = lineage[path]
        rows[path.removeprefix("output/")] = {
            translate("inputs"): ", ".join(each.removeprefix("output/") for each in job["inputs"]),
            translate("source"): describe_origin(job, licenses.get(path)),
            translate("spec"): job["spec"][:16],
            # The changes after which a result was accepted (scripts/accept.py).
            translate("accepted changes"): ", ".join(
                f"{entry['date']}: {entry['because']} ({'; '.join(entry['changes'])})"
                for entry in job.get("accepted", ())
            ),
            **{name_of("run", key): run_value(key, run.get(key)) if run else "?" for key in COSTS},
        }
    rows[translate("time of all jobs")] = {name_of("run", "seconds"): total_cost(runs)}
    note = translate(
        "A spec is the digest of a job's settings, code and inputs. The table shows its first"
        " 16 digits. The time of a resumed training starts where it was resumed."
    )
    table = table_of("", rows, note, translate("job"))._replace(has_texts=True)
    return Section(translate("Lineage and costs"), tables=[table])


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
        origin = translate(
            "{number} files, digest {digest}", number=files["number"], digest=files["digest"][:16]
        )
    elif "generate" in settings:
        origin = translate(
            "generated ({generator}, seed {seed})",
            generator=settings["generate"],
            seed=settings["seed"],
        )
    elif "init" in settings:
        origin = translate("random weights (seed {seed})", seed=settings["seed"])
    else:
        return ""
    return origin + (translate(", licence {license}", license=license) if license else "")


def read_runs(lineage: Lineage) -> Runs:
    """Read run.json of each job of a lineage, by path.

    None stands for a run that is unknown: the file is missing or damaged, or belongs to another run
    than the one that made the result.
    """
    return {path: read_run_record(path, lineage[path]["spec"]) for path in upstream_first(lineage)}


def total_cost(runs: Runs) -> str:
    """Return the time of all jobs together."""
    return format_duration(sum(run["seconds"] for run in runs.values() if run))


def run_table(training: Training) -> Table:
    """Return the table of the run of a training, which is known."""
    run, job = training.run, training.job
    last = training.steps[-1] if training.steps else {}
    prefix = "policy/" if training.stage == "rlhf" else ""
    scaling = {key: last.get(f"{prefix}{key}") for key in ("skipped_steps", "loss_scale")}
    for name, key in {"losses": f"{prefix}loss", "value_losses": "value/loss"}.items():
        if losses := [step[key] for step in training.steps if key in step]:
            means = losses[0], losses[-1], statistics.fmean(losses)
            scaling[name] = ", ".join(map(format_number, means))
    measured = {"command": rebuild_command(training.path, run), **job["facts"], **scaling, **run}
    if "seconds_per_step" in run:
        measured |= throughput(training)
    known = NAMES["run"]
    order = [*known, *sorted(measured.keys() - known.keys() - {*APART})]
    shown = {
        name_of("run", key): run_value(key, measured[key])
        for key in order
        if measured.get(key) is not None
    }
    note = translate(
        "Floating point operations are counted as in appendix B of the PaLM paper (Chowdhery et al."
        " 2022), without padding and recomputation. Rates are measured on the median step, without"
        " saving, loading and evaluation."
    )
    return value_table(translate("Run"), shown, note)


def rebuild_command(path: str, run: Mapping[str, Any]) -> str:
    """Return the command that builds a result as its run did."""
    options = shlex.join(run["options"].get("snakemake", ()))
    return f"snakemake --cores 1 {path} {options}".rstrip()


def throughput(training: Training) -> dict[str, float | None]:
    """Return the throughput of all processes of a training together, on a step of median length.

    Rows are pairs in DPO and prompts in RLHF. `utilization` is the share of the GPUs' peak rate
    (MFU), None if it is unknown.
    """
    settings, run, train = training.job["settings"], training.run, training.tokens["train"]
    # Mean tokens of the prompt, and of all responses of a row, which share a prompt and do not
    # attend to each other.
    lengths = {name: tokens["sum"] / train["rows"] for name, tokens in train["tokens"].items()}
    prompt, responses = lengths.pop("prompt"), sum(lengths.values())
    if training.stage == "rlhf":
        # An evaluation before training (step 0) has no responses of a step.
        sampled = [step["response/length"] for step in training.steps if "response/length" in step]
        count, batch = settings["num_generations"], settings["rollout_batch_size"]
        responses = count * sum(sampled) / len(sampled)
        flops = rlhf_flops(
            *(run["models"], prompt + responses / count, settings["ppo_epochs"]),
            run.get("evaluated_in_update", False),
        )
    else:
        count, batch = len(lengths), settings["global_batch_size"]
        flops = training_flops(run["models"]["model"], prompt + responses / count)
    rows = min(batch, train["rows"]) / run["seconds_per_step"]
    tokens = rows * (prompt + responses)
    placement = run["placement"]
    peak = peak_flops(run.get("gpu", "")) if settings["dtype"] != "fp32" else None
    gpus = placement["nodes"] * placement["gpus_per_node"]
    return {
        "rows_per_second": rows,
        "tokens_per_second": tokens,
        "flops_per_second": flops * tokens,
        "utilization": flops * tokens / (gpus * peak) if peak else None,
    }
