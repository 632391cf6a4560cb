"""The section of a page that shows whether recipes meet their expectations."""

from collections.abc import Iterator
from typing import Any

from snakechat.reporting.page_parts import (
    Cell,
    Section,
    Table,
    Tone,
    format_interval,
    format_metric,
    metric_cell,
)
from snakechat.reporting.translations import Translate
from snakechat.reporting.verdicts import Verdict, judge
from snakechat.workflow.job import Job

# Verdicts by recipe, STAGE/NAME.
Verdicts = dict[str, list[Verdict]]


def judge_inputs(job: Job[Any], evaluations: dict[str, str], recipes: dict[str, str]) -> Verdicts:
    """Return the verdicts on the evaluations that a page shows, of recipes that expect something.

    Args:
        job: The job of the page. Its settings may have `expectations`, by stage.
        evaluations: The input with the evaluation of each stage.
        recipes: The recipe of each stage.
    """
    return {
        f"{stage}/{recipes[stage]}": judge(
            stage,
            expected,
            job.inputs[evaluations[stage]],
            job.inputs.get(f"baseline.{stage}"),
        )
        for stage, expected in getattr(job.settings, "expectations", {}).items()
    }


def expectation_remarks(verdicts: Verdicts, translate: Translate) -> Iterator[str]:
    """Yield a sentence for each recipe that misses an expectation."""
    for recipe, found in verdicts.items():
        if missed := [verdict.metric for verdict in found if not verdict.met]:
            yield translate(
                "{recipe} misses what it is expected to reach: {metrics}.",
                recipe=recipe,
                metrics=", ".join(missed),
            )


def expectation_sections(verdicts: Verdicts, translate: Translate) -> list[Section]:
    """Return the section of the expectations: a table for each recipe that has some."""
    head = ["", translate("value"), translate("expected")]
    tables = [
        Table(recipe, head, [verdict_row(verdict, translate) for verdict in found])
        for recipe, found in verdicts.items()
    ]
    return [Section(translate("Expectations"), shown_tables=tables)] if tables else []


def verdict_row(verdict: Verdict, translate: Translate) -> list[Any]:
    """Return the row of a verdict: the metric, its value, and what is expected."""
    path, figure = verdict.metric, verdict.figure
    tone: Tone = "met" if verdict.met else "missed"
    value = figure and metric_cell(path, figure.value, figure.interval, tone)
    return [path, value or Cell(translate("none"), "", tone), expected_text(verdict, translate)]


def expected_text(verdict: Verdict, translate: Translate) -> str:
    """Return what is expected of a metric, as on pages."""
    bound = format_metric(verdict.metric, verdict.bound)
    if verdict.kind == "not_worse_than":
        assert verdict.difference is not None
        return translate(
            "not worse than {value} of {baseline}; difference {difference} {interval}",
            value=bound,
            baseline=verdict.baseline,
            difference=format_metric(verdict.metric, verdict.difference.value, signed=True),
            interval=format_interval(verdict.metric, verdict.difference.interval, signed=True),
        )
    if verdict.by == "value":
        if verdict.kind == "min":
            return translate("at least {bound}", bound=bound)
        return translate("at most {bound}", bound=bound)
    end = translate("lower bound") if verdict.by == "lower_bound" else translate("upper bound")
    if verdict.kind == "min":
        return translate("{end} at least {bound}", end=end, bound=bound)
    return translate("{end} at most {bound}", end=end, bound=bound)
