"""The section of a page that shows whether recipes meet their expectations."""

from collections.abc import Iterator, Sequence
from typing import Any

from snakechat.reporting.page_parts import Cell, Section, Table, format_interval, format_metric
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
    """Return the section of the expectations, if there are any."""
    rows = [
        [f"{recipe}: {verdict.metric}", *verdict_cells(verdict, translate)]
        for recipe, found in verdicts.items()
        for verdict in found
    ]
    if not rows:
        return []
    head = ["", translate("value"), translate("expected"), translate("difference"), ""]
    has_differences = any(verdict.difference for found in verdicts.values() for verdict in found)
    if not has_differences:
        head.pop(3)
        rows = [[*row[:3], row[4]] for row in rows]
    return [Section(translate("Expectations"), shown_tables=[Table("", head, rows)])]


def verdict_cells(verdict: Verdict, translate: Translate) -> Sequence[Any]:
    """Return the cells of a verdict: value, what is expected, difference, and whether it is met."""
    path, figure, difference = verdict.metric, verdict.figure, verdict.difference
    found = figure and Cell(
        format_metric(path, figure.value), format_interval(path, figure.interval)
    )
    change = difference and Cell(
        format_metric(path, difference.value, signed=True),
        format_interval(path, difference.interval, signed=True),
    )
    result = (
        Cell(translate("met"), "", "met")
        if verdict.met
        else Cell(translate("missed"), "", "missed")
    )
    return found, expected_text(verdict, translate), change, result


def expected_text(verdict: Verdict, translate: Translate) -> str:
    """Return what is expected of a metric, as on pages."""
    bound = format_metric(verdict.metric, verdict.bound)
    if verdict.kind == "not_worse_than":
        return translate(
            "not worse than {value} of {baseline}", value=bound, baseline=verdict.baseline
        )
    if verdict.by == "value":
        if verdict.kind == "min":
            return translate("at least {bound}", bound=bound)
        return translate("at most {bound}", bound=bound)
    end = translate("lower bound") if verdict.by == "lower_bound" else translate("upper bound")
    if verdict.kind == "min":
        return translate("{end} at least {bound}", end=end, bound=bound)
    return translate("{end} at most {bound}", end=end, bound=bound)
