"""The jobs behind a result: their data, sources, costs and throughput, as sections of a page."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from snakechat.estimates.flops import peak_flops, rlhf_flops, training_flops
from snakechat.pages.metrics import STAGES
from snakechat.pages.page import Section, Table, as_text, value_table
from snakechat.pages.texts import (
    N_,
    RUN_ROWS,
    format_cell,
    format_duration,
    format_memory,
    format_number,
    format_share,
    translate,
)
from snakechat.workflow.manifest import Lineage, read_run_record, upstream_first

Statistics = Mapping[str, Any]
Runs = dict[str, dict[str, Any] | None]
QUANTILES = ("p1", "p10", "p50", "p90", "p99")
# The columns of the lineage, and of the costs.
LINEAGE_HEAD = (
    *(N_("job"), N_("rule"), N_("inputs"), N_("source"), N_("spec"), N_("accepted changes")),
)
COST_HEAD = (
    N_("job"),
    N_("started (UTC)"),
    N_("time"),
    N_("peak memory of the first process"),
    N_("peak memory of its GPU"),
)
# The forms of values in RUN_ROWS; other values are shown as they are.
FORMS: dict[str, Callable[[Any], str]] = {
    "share": format_share,
    "duration": format_duration,
    "memory": format_memory,
    "integer": "{:,.0f}".format,
    "step_time": lambda seconds: translate("{seconds} s/step", seconds=format_cell(seconds)),
    "rows": lambda rate: translate("{rate} rows/s", rate=format_cell(rate)),
    "tokens": lambda rate: translate("{rate} tokens/s", rate=f"{rate:,.0f}"),
    "flops": lambda rate: format_flops(rate),
    "models": lambda models: describe_models(models),
    "time": lambda text: text[:16].replace("T", " "),
}
# What has tables of its own, or is the title of the page.
APART = ("spec", "placement", "versions", "options", "unchanged_because")


def phase_section(phases: Mapping[str, Statistics]) -> Section:
    """Return the section of the rows of each phase and of their lengths.

    phases: stats.json of tokens, by stage.
    """
    splits = {
        f"{stage}.{split}": phase[split] for stage, phase in phases.items() for split in phase
    }
    counts = {
        name: {
            translate("rows"): of["rows"],
            **{f"{translate('truncated')}: {what}": n for what, n in of["truncated"].items()},
            **{f"{translate('dropped')}: {why}": n for why, n in of["dropped"].items()},
        }
        for name, of in splits.items()
    }
    kinds = list(dict.fromkeys(kind for of in counts.values() for kind in of))
    rows = [[name, *(of.get(kind, 0) for kind in kinds)] for name, of in counts.items()]
    lengths = [
        [f"{name}: {what}", *(of[key] for key in ("mean", *QUANTILES, "p100"))]
        for name, split in splits.items()
        for what, of in split["tokens"].items()
    ]
    head = ["", translate("mean"), *QUANTILES, translate("maximum")]
    tables = [
        Table(translate("rows"), ["", *kinds], rows),
        Table(translate("lengths (tokens)"), head, lengths),
    ]
    return Section(translate("Rows of each phase"), tables=tables)


def prompt_section(statistics: Mapping[str, Statistics]) -> Section:
    """Return the section of repeated and shared prompts, and of which response is longer.

    statistics: stats.json of the datasets, by input name (records.DATASET, rows.DATASET).
    """
    datasets = [name.partition(".")[2] for name in statistics if name.startswith("records.")]
    shared = [
        [
            f"{dataset}: {phase}",
            of["rows"],
            ", ".join(
                f"{other} {format_number(count)}"
                for other, count in of.get("rows_whose_prompt_is_in", {}).items()
            ),
        ]
        for dataset in datasets
        for phase, of in statistics[f"rows.{dataset}"].items()
    ]
    note = translate(
        "If the reward phase and RLHF share prompts, scores during RLHF are optimistic. The setting"
        " split: {by: prompt} keeps all rows of a prompt in one phase."
    )
    rows = [
        [
            dataset,
            of["rows"],
            format_share(of["repeated_prompts"] / of["rows"]),
            longer and format_share(longer),
        ]
        for dataset in datasets
        for of in [statistics[f"records.{dataset}"]["train"]]
        for longer in [of.get("chosen_longer_share")]
    ]
    labels = translate("prompt of an earlier row"), translate("chosen response is the longer one")
    head = ["", translate("rows")]
    tables = [
        Table(translate("datasets"), [*head, *labels], rows),
        Table(
            translate("phases"),
            [*head, translate("rows whose prompt another phase has")],
            shared,
            note,
        ),
    ]
    return Section(translate("Prompts of each dataset"), tables=tables)


def lineage_section(lineage: Lineage, licenses: Mapping[str, str | None]) -> Section:
    """Return the table of the jobs that a report was made from, each below its inputs.

    licenses: The licences of the sources, by path.
    """
    rows = [
        [
            path.removeprefix("output/"),
            lineage[path]["rule"],
            ", ".join(each.removeprefix("output/") for each in lineage[path]["inputs"]),
            describe_origin(lineage[path], licenses.get(path)),
            lineage[path]["spec"][:16],
            accepted_changes(lineage[path]),
        ]
        for path in upstream_first(lineage)
    ]
    note = translate(
        "A spec is the digest of a job's settings, code and inputs. The table shows its first"
        " 16 digits."
    )
    table = Table("", list(map(translate, LINEAGE_HEAD)), rows, note, has_texts=True)
    return Section(translate("Lineage"), tables=[table])


def describe_origin(entry: Mapping[str, Any], license: str | None = None) -> str:
    """Describe the external source of a job in the lineage, or the parameters that generated it.

    Returns "" if all inputs of the job are jobs.

    license: Licence of the source. It is appended if given.
    """
    settings, files = entry["settings"], entry["files"]
    if "hub" in settings:
        # The commit, because a revision may be a branch.
        commit = entry["facts"].get("commit", settings["revision"])
        origin = f"{settings['hub']} @ {commit}"
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


def accepted_changes(job: Mapping[str, Any]) -> str:
    """Describe the changes after which a result was accepted (scripts/accept.py)."""
    return ", ".join(
        f"{entry['date']}: {entry['because']} ({'; '.join(entry['changes'])})"
        for entry in job.get("accepted", ())
    )


def read_runs(lineage: Lineage) -> Runs:
    """Read run.json of each job of a lineage, by path.

    None stands for a run that is unknown: the file is missing or damaged, or belongs to another run
    than the one that made the result.
    """
    return {path: read_run_record(path, lineage[path]["spec"]) for path in upstream_first(lineage)}


def total_cost(runs: Runs) -> str:
    """Return the time of all jobs together."""
    return format_duration(sum(run["seconds"] for run in runs.values() if run))


def cost_section(runs: Runs) -> Section:
    """Return the section of the time and the memory of the jobs."""
    rows: list[list[Any]] = []
    for path, run in runs.items():
        cells: list[Any] = [translate("unknown"), None, None, None]
        if run is not None:
            gpu = run.get("peak_gpu_memory_mb")
            cells = [
                run["started"][:16].replace("T", " "),
                format_duration(run["seconds"]),
                format_memory(run["peak_memory_mb"]),
                gpu and format_memory(gpu),
            ]
        rows.append([path.removeprefix("output/"), *cells])
    rows.append([translate("time of all jobs"), "", total_cost(runs), None, None])
    note = translate("The time of a resumed training starts where it was resumed.")
    table = Table("", list(map(translate, COST_HEAD)), rows, note)
    return Section(translate("Costs"), tables=[table])


def run_section(
    stage: str,
    path: str,
    training: Mapping[str, Any],
    run: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    train: Statistics,
) -> Section:
    """Return the section of the run of a training.

    Args:
        stage: sft, reward, dpo or rlhf.
        path: Path of the training.
        training: The training in the lineage.
        run: run.json of the training.
        steps: The lines of metrics.jsonl.
        train: stats.json of the tokens that it was trained on.
    """
    prefix = "policy/" if stage == "rlhf" else ""
    last = steps[-1] if steps else {}
    scaling = {key: last.get(f"{prefix}{key}") for key in ("skipped_steps", "loss_scale")}
    measured = {"command": rebuild_command(path, run), **training["facts"], **scaling, **run}
    if "seconds_per_step" in run:
        measured |= throughput(stage, training["settings"], run, steps, train)
    order = [*RUN_ROWS, *sorted(measured.keys() - RUN_ROWS.keys() - {*APART})]
    shown = {}
    for key in order:
        row, value = RUN_ROWS.get(key, {"en": key}), measured.get(key)
        if value is not None:
            other = format_cell if isinstance(value, float) else as_text
            shown[translate(row["en"])] = FORMS.get(row.get("form", ""), other)(value)
    note = translate(
        "Floating point operations are counted as in appendix B of the PaLM paper (Chowdhery et al."
        " 2022), without padding and recomputation. Rates are measured on the median step, without"
        " saving, loading and evaluation."
    )
    return Section(
        translate("Run: {model}", model=translate(STAGES[stage])),
        tables=[value_table("", shown, note)],
        folded=[
            value_table(translate("Placement"), dict(sorted(run["placement"].items()))),
            value_table(translate("Software"), dict(sorted(run["versions"].items()))),
        ],
    )


def format_flops(rate: float) -> str:
    """Format floating point operations per second, in the unit that people read."""
    for unit, size in (("PFLOP/s", 1e15), ("TFLOP/s", 1e12)):
        if rate >= size:
            return f"{format_cell(rate / size)}\N{NO-BREAK SPACE}{unit}"
    return f"{format_cell(rate / 1e9)}\N{NO-BREAK SPACE}GFLOP/s"


def describe_models(models: Mapping[str, Mapping[str, int]]) -> str:
    """Return the sizes of the trained models as text."""
    return "; ".join(
        translate(
            "{name}: {weights} weights ({trained} trained), {layers} layers of {size}",
            name=name,
            weights=format_number(size["weights"]),
            trained=format_number(size["trained"]),
            layers=size["layers"],
            size=size["hidden_size"],
        )
        for name, size in models.items()
    )


def rebuild_command(path: str, run: Mapping[str, Any]) -> str:
    """Return the command that builds a result as its run did."""
    options = shlex.join(run["options"].get("snakemake", ()))
    return f"snakemake --cores 1 {path} {options}".rstrip()


def throughput(
    stage: str,
    settings: Mapping[str, Any],
    run: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    train: Statistics,
) -> dict[str, float | None]:
    """Return the throughput of all processes of a training together, on a step of median length.

    Rows are pairs in DPO and prompts in RLHF. `utilization` is the share of the GPUs' peak rate
    (MFU), None if it is unknown. Arguments: those of run_section.
    """
    # Mean tokens of the prompt and of each kind of response of a row. All responses share a prompt.
    lengths = {name: tokens["sum"] / train["rows"] for name, tokens in train["tokens"].items()}
    counts = dict.fromkeys(lengths, 1)
    if stage == "rlhf":
        # An evaluation before training (step 0) has no responses of a step.
        sampled = [line["response/length"] for line in steps if "response/length" in line]
        lengths["response"] = sum(sampled) / len(sampled)
        counts["response"] = settings["num_generations"]
    tokens = sum(length * counts.get(name, 1) for name, length in lengths.items())
    batch = settings["rollout_batch_size" if stage == "rlhf" else "global_batch_size"]
    rows = min(batch, train["rows"]) / run["seconds_per_step"]
    # The responses of a row do not attend to each other.
    prompt, *responses = lengths["prompt"], *(lengths[name] for name in lengths if name != "prompt")
    length = prompt + sum(responses) / len(responses)
    if stage == "rlhf":
        flops = rlhf_flops(run["models"], length, settings["ppo_epochs"])
    else:
        flops = training_flops(run["models"]["model"], length)
    flops *= rows * tokens
    placement = run["placement"]
    peak = peak_flops(run.get("gpu", "")) if settings["dtype"] != "fp32" else None
    gpus = placement["nodes"] * placement["gpus_per_node"]
    return {
        "rows_per_second": rows,
        "tokens_per_second": rows * tokens,
        "flops_per_second": flops,
        "utilization": flops / (gpus * peak) if peak else None,
    }
