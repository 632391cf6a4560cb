"""The report of a recipe: its results, training, data, lineage and costs."""

from collections.abc import Mapping, Sequence
from typing import Any

from snakechat.data.cards import source_licenses
from snakechat.pages.jobs import (
    cost_section,
    lineage_section,
    phase_section,
    prompt_section,
    read_runs,
    run_section,
    total_cost,
)
from snakechat.pages.metrics import (
    STAGES,
    numbers_of,
    own_metrics,
    read_benchmarks,
    read_json,
    read_json_lines,
    with_metrics_before,
)
from snakechat.pages.page import (
    Cell,
    Page,
    Section,
    value_table,
    write_csv,
    write_headline,
    write_record,
)
from snakechat.pages.plots import curve_section, points_of
from snakechat.pages.responses import response_sections
from snakechat.pages.results import benchmark_sections, headline, remarks_on, result_section
from snakechat.pages.rows import row_section
from snakechat.pages.texts import format_share, translate
from snakechat.workflow.job import Job

# Training rows of each stage that a report shows by token.
SHOWN_ROWS = 2


def report(job: Job[Any]) -> Page:
    """Return the page of a recipe; write its record, a table of all metrics and the headline.

    The start page of Snakemake's report shows the headline.
    """
    stage, lineage = job.settings.stage, job.lineage
    # RLHF from a plain model has no SFT model, and with reward functions only, no reward model.
    stages = [each for each in STAGES if f"train_{each}" in job.inputs]
    paths = {each: job.spec["inputs"][f"train_{each}"]["path"] for each in stages}
    trainings = {each: lineage[path] for each, path in paths.items()}
    steps = {
        each: read_json_lines(job.inputs[f"train_{each}"] / "metrics.jsonl") for each in stages
    }
    metrics = {
        each: with_metrics_before(
            read_json(job.inputs[f"evaluate_{each}"] / "metrics.json"), steps[each]
        )
        for each in stages
    }
    statistics = {
        name: read_json(folder / "stats.json")
        for name, folder in job.inputs.items()
        if name.partition(".")[0] in ("records", "rows", "tokens")
    }
    runs = read_runs(lineage)
    responses = []
    if stage != "reward":
        lines = read_json_lines(job.inputs[f"evaluate_{stage}"] / "responses.jsonl")
        responses = response_sections(lines, metrics[stage].get("num_generations", 1))
    # The table of software has the distributions of a command.
    settings = {k: v for k, v in trainings[stage]["settings"].items() if k != "distributions"}
    # The recipe first, then the models behind it.
    sections = [
        result_section(each, metrics[each])
        for each in sorted(stages, key=lambda each: each != stage)
    ]
    sections += benchmark_sections(stage, read_benchmarks(job.inputs, "benchmark."))
    sections += responses
    sections += [training_section(e, trainings[e]["settings"], steps[e]) for e in stages]
    sections += [
        row_section(
            translate("Training rows: {model}", model=translate(STAGES[each])),
            job.inputs[f"tokens.{each}"],
            job.inputs[f"train_{each}"],
            trainings[each]["settings"],
            SHOWN_ROWS,
        )
        for each in stages
    ]
    sections += [
        phase_section({each: statistics[f"tokens.{each}"] for each in stages}),
        prompt_section(statistics),
        lineage_section(lineage, source_licenses(lineage, job.options.licenses)),
        Section(translate("Settings"), tables=[value_table("", dict(sorted(settings.items())))]),
        cost_section(runs),
    ]
    for each, path in paths.items():
        if record := runs[path]:
            train = statistics[f"tokens.{each}"]["train"]
            sections.append(run_section(each, path, trainings[each], record, steps[each], train))
    page = Page(
        eyebrow=translate("Report"),
        title=f"{stage}/{job.settings.name}",
        cards=headline(stage, metrics[stage]),
        remarks=[
            f"{translate(STAGES[each])}: {remark}"
            for each in stages
            for remark in (*remarks_on(each, metrics[each]), training_remark(trainings[each]))
            if remark
        ],
        sections=sections,
        notes=[
            translate(
                "All metrics are measured on held-out rows and prompts. Brackets contain 95 %"
                " intervals."
            )
        ],
    )
    write_record(job.result, page)
    cost = {translate("time of all jobs"): Cell(total_cost(runs))}
    write_headline(job.result / "headline.html", {**page.cards, **cost})
    numbers = [
        (each, name, f"{value:.10g}")
        for each in stages
        for name, value in numbers_of(metrics[each])
    ]
    write_csv(job.result / "metrics.csv", ("stage", "metric", "value"), numbers)
    return page


def training_section(
    stage: str, settings: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]
) -> Section:
    """Return the section of the curves of a training.

    Args: As of own_metrics.
    """
    title = translate("Training: {model}", model=translate(STAGES[stage]))
    caption = translate("Thin lines show the values of the steps, thick lines their moving mean.")
    lines = {
        translate("training"): lambda key: points_of(steps, key),
        translate("held-out rows"): lambda key: points_of(steps, f"eval_{key}"),
    }
    return curve_section(title, caption, stage, lines, own_metrics(stage, settings, steps))


def training_remark(training: Mapping[str, Any]) -> str:
    """Return a remark on the weights that a training saved, or "".

    training: The training in the lineage.
    """
    facts = training["facts"]
    if "unchanged_because" not in facts:
        return ""
    if facts["unchanged_because"] == "learning_rate":
        reason = translate(
            "the learning rate was 0 until step {step}, which was saved", step=facts["saved_step"]
        )
    else:
        reason = translate(
            "rounding to {dtype} has discarded most of the training, and save_dtype: fp32 keeps it",
            dtype=training["settings"]["dtype"],
        )
    return translate(
        "{share} of the trained weights differ from the start: {reason}.",
        share=format_share(facts["changed_weights"]),
        reason=reason,
    )
