"""Compare recipes of a stage on one page: settings that differ, results and curves.

A recipe is NAME, or NAME@KEY for a version in the cache.

Recipes that differ only in their seed are one column: mean and interval over the seeds.
comparison.csv and comparison.json have the same numbers.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from snakechat.reporting.comparison import (
    COLUMNS,
    Estimate,
    Group,
    Run,
    difference_rows,
    excludes_zero,
    group_by_settings,
    group_names,
    long_rows,
)
from snakechat.reporting.curve_points import Line, Point, points_of
from snakechat.reporting.formatting import format_duration
from snakechat.reporting.html_pages import write_sections
from snakechat.reporting.labels import (
    CURVES,
    MODELS,
    PAIRS,
    PERPLEXITIES,
    RESPONSES,
    WIN_RATES,
    is_fraction,
    is_share,
)
from snakechat.reporting.page_parts import (
    Card,
    Cell,
    Section,
    Table,
    difference_cell,
    format_interval,
    format_metric,
    mark_best,
    metric_cell,
)
from snakechat.reporting.plots import Estimated, Panel, draw_estimates, draw_lines
from snakechat.reporting.setting_differences import (
    Difference,
    as_texts,
    comparable_settings,
    setting_differences,
    upstream_roles,
)
from snakechat.reporting.translations import Translate, translator
from snakechat.workflow.job import Job, run
from snakechat.workflow.lineage import merge_lineages
from snakechat.workflow.run_record import read_run_record
from snakechat.workflow.stored_versions import is_version, read_version_file

# Results of each stage: labels by path in metrics.json.
_PAIR_KEYS = ("accuracy", "ties", "loss", "calibration_error")
_RESPONSE_KEYS = ("score", "judge_score", "success", "greedy_success")
_STYLE_KEYS = ("kl_to_sft", "kl_to_dpo", "kl_to_base", "length", "ended_by_eos")
_PAIR_RESULTS = {key: PAIRS[key] for key in _PAIR_KEYS}
RESULTS = {
    "sft": {f"after.{key}": label for key, label in PERPLEXITIES.items()},
    "reward": _PAIR_RESULTS,
    "dpo": _PAIR_RESULTS,
    "rlhf": {
        **{f"rlhf.{key}": RESPONSES[key] for key in _RESPONSE_KEYS},
        **{
            f"wins.rlhf.{initial}.{key}": label
            for initial, labels in WIN_RATES.items()
            for key, label in labels.items()
        },
        **{f"rlhf.{key}": RESPONSES[key] for key in _STYLE_KEYS},
    },
}

Row = list[str]


def main(job: Job[Any]) -> None:
    """Write the page, comparison.csv and comparison.json."""
    translate = translator(job.settings.language)
    stage, _, name = job.spec["name"].partition("/")
    groups = group_by_settings([read_run(job, recipe) for recipe in job.settings.recipes])
    metrics = RESULTS[stage]
    write_data(job.result, groups, metrics)
    labels = group_labels(groups, translate)
    differences = difference_tables(groups, metrics, translate)
    seeds = seed_tables(groups, metrics, translate)
    sections = [
        result_section(groups, metrics, differences, translate),
        curve_section(groups, CURVES[stage], translate),
        Section(
            translate("Settings that differ"),
            shown_tables=[Table("", ["", *labels], setting_rows(groups, translate))],
        ),
    ]
    if seeds:
        sections.append(Section(translate("Results of each seed"), tables=seeds))
    write_sections(
        job.result / "comparison.html",
        job.settings.language,
        eyebrow=translate("Comparison of {stage} recipes", stage=MODELS.get(stage, stage)),
        title=name,
        cards=group_cards(groups, metrics, translate),
        remarks=list(remarks(groups, metrics, translate)),
        sections=sections,
        links=[
            {"path": f"{job.target.name}/{file}", "name": file}
            for file in ("comparison.csv", "comparison.json")
        ],
        notes=list(notes(differences, translate)),
    )


def read_run(job: Job[Any], name: str) -> Run:
    """Read a training and its evaluation from the inputs of a job, or from the cache."""
    if is_version(name):
        folders = job.placement["versions"][name]
        manifest = json.loads(Path(folders["training"], "manifest.json").read_text())
        path, lineage = manifest["spec"]["path"], merge_lineages([manifest])
        steps = read_version_file(folders["training"], "metrics.jsonl")
        metrics = read_version_file(folders["evaluation"], "metrics.json")
    else:
        path, lineage = str(job.inputs[f"training.{name}"]), job.lineage
        steps = Path(path, "metrics.jsonl").read_text()
        metrics = (job.inputs[f"evaluation.{name}"] / "metrics.json").read_text()
    settings = comparable_settings(lineage[path])
    return Run(
        name=name,
        seed=settings.pop("seed"),
        settings=settings,
        upstream=upstream_roles(lineage, path),
        swept=job.settings.swept.get(name, {}),
        steps=[json.loads(line) for line in steps.splitlines()],
        metrics=json.loads(metrics),
        seconds=None if is_version(name) else training_seconds(path, lineage[path]["spec"]),
    )


def training_seconds(path: str, spec: str) -> float | None:
    """Return the time of a training from NAME.run.json; None if the run is unknown."""
    run = read_run_record(path, spec)
    return run["seconds"] if run else None


def write_data(folder: Path, groups: Sequence[Group], metrics: Mapping[str, str]) -> None:
    """Write comparison.csv and comparison.json: all numbers, by untranslated names."""
    rows = long_rows(groups, metrics)
    with (folder / "comparison.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    differences = differences_between(groups)
    data = {
        "groups": [
            {
                "group": name,
                "recipes": [run.name for run in group.runs],
                "seeds": [run.seed for run in group.runs],
                "settings": {each.setting: each.values[number] for each in differences},
            }
            for number, (name, group) in enumerate(zip(group_names(groups), groups, strict=True))
        ],
        "results": rows,
        "differences": difference_rows(groups, metrics),
    }
    text = json.dumps(data, indent=2, ensure_ascii=False)
    (folder / "comparison.json").write_text(f"{text}\n", encoding="utf-8")


def differences_between(groups: Sequence[Group]) -> list[Difference]:
    """Return the settings that differ between groups."""
    first = [group.runs[0] for group in groups]
    return setting_differences([run.settings for run in first], [run.upstream for run in first])


def group_labels(groups: Sequence[Group], translate: Translate) -> list[str]:
    """Return the names of groups, with their number of seeds if there are several."""
    return [
        translate("{name} ({count} seeds)", name=name, count=len(group.runs))
        if len(group.runs) > 1
        else name
        for name, group in zip(group_names(groups, translate), groups, strict=True)
    ]


def setting_rows(groups: Sequence[Group], translate: Translate) -> list[Row]:
    """Return rows of the settings that differ between groups, and of the seeds."""
    rows = []
    for setting, also, values in differences_between(groups):
        if also:
            setting = translate("{setting} (also {jobs})", setting=setting, jobs=", ".join(also))
        rows.append([setting, *as_texts(values)])
    seeds = [", ".join(str(run.seed) for run in group.runs) for group in groups]
    return [*rows, [translate("seed"), *seeds]]


def result_section(
    groups: Sequence[Group],
    metrics: dict[str, str],
    differences: Sequence[Table],
    translate: Translate,
) -> Section:
    """Return the section of results: a panel of each metric, differences, and all numbers.

    metrics: labels by path in metrics.json.
    """
    names, panels = group_names(groups, translate), []
    for path, label in metrics.items():
        results = [group.result(path) for group in groups]
        if any(results):
            title = translate(label)
            estimates: dict[str, Estimated | None] = {
                name: (result.value, result.interval) if result else None
                for name, result in zip(names, results, strict=True)
            }
            svg = draw_estimates(title, estimates, None, is_fraction(path))
            panels.append(Panel(title, svg))
    rows = result_rows(groups, metrics, translate)
    note = translate("★ marks the best value of a row, where one direction is better.")
    table = Table(translate("Results"), ["", *group_labels(groups, translate)], rows, note)
    return Section(
        translate("Results"),
        panels=panels,
        caption=translate("Bars are 95 % intervals; points without a bar have none."),
        shown_tables=[*differences, table],
    )


def curve_section(groups: Sequence[Group], curves: dict[str, str], translate: Translate) -> Section:
    """Return the section of curves by step, with the range over the seeds of each group."""
    labels = group_labels(groups, translate)
    panels = []
    for key, label in curves.items():
        lines = {
            name: Line(points_of_group(group, key))
            for name, group in zip(labels, groups, strict=True)
        }
        if any(line.points for line in lines.values()):
            title = translate(label)
            panels.append(Panel(title, draw_lines(title, lines, translate("step"), is_share(key))))
    caption = translate(
        "Of several seeds, the line is their mean, and the band reaches from the lowest to the"
        " highest seed. A single seed has its values as a thin line. Thick lines and bands are"
        " moving means over neighbouring steps."
    )
    return Section(translate("Curves"), panels=panels, legend=labels, caption=caption)


def points_of_group(group: Group, key: str) -> Sequence[Point]:
    """Return the points of a metric: with the range over several seeds, or of a single one."""
    return group.points(key) if len(group.runs) > 1 else points_of(group.runs[0].steps, key)


def group_cards(
    groups: Sequence[Group], metrics: Mapping[str, str], translate: Translate
) -> list[Card]:
    """Return for each group the first metric of all groups, and the mean time of a training."""
    cards = []
    headline = next((path for path in metrics if all(group.result(path) for group in groups)), None)
    for name, group in zip(group_names(groups, translate), groups, strict=True):
        notes = []
        seconds = [run.seconds for run in group.runs if run.seconds is not None]
        if seconds:
            duration = format_duration(sum(seconds) / len(seconds))
            notes = [translate("training time per seed: {duration}", duration=duration)]
        notes.append(f"n = {len(group.runs)}")
        if headline and (result := group.result(headline)):
            label = translate(metrics[headline])
            interval = format_interval(headline, result.interval)
            text = f"{label} {interval}".strip()
            cards.append(
                Card(name, format_metric(headline, result.value), "; ".join([text, *notes]))
            )
    return cards


def remarks(
    groups: Sequence[Group], metrics: dict[str, str], translate: Translate
) -> Iterator[str]:
    """Yield sentences: which differences exclude 0, and that two seeds say little."""
    first, *others = zip(groups, group_names(groups, translate), strict=True)
    compared = [
        (group, name)
        for group, name in others
        if any(group.difference(first[0], path) for path in metrics)
    ]
    for group, name in compared:
        found = [
            f"{translate(label)} {format_metric(path, difference.value, signed=True)}"
            for path, label in metrics.items()
            if (difference := group.difference(first[0], path)) and excludes_zero(difference)
        ]
        if found:
            yield translate(
                "{name} differs from {first}: {metrics}. The 95 % intervals of these differences"
                " exclude 0.",
                name=name,
                first=first[1],
                metrics="; ".join(found),
            )
        else:
            yield translate(
                "{name} and {first} do not differ measurably: all 95 % intervals of their"
                " differences contain 0.",
                name=name,
                first=first[1],
            )
    if not compared and others:
        yield translate(
            "A single seed does not distinguish a better recipe from a lucky one. A sweep over"
            " `seed` gives intervals of the differences."
        )
    if compared and min(len(group.runs) for group in groups) == 2:
        yield translate("With two seeds, intervals are several times as wide as with three.")


def result_rows(
    groups: Sequence[Group], labels: dict[str, str], translate: Translate
) -> list[list[Any]]:
    """Return rows of the results that any group has. labels: by path in metrics.json."""
    rows = []
    for path, label in labels.items():
        results = [group.result(path) for group in groups]
        if any(results):
            cells = [result_cell(path, result) for result in results]
            values = [result.value if result else None for result in results]
            rows.append([translate(label), *mark_best(path, cells, values)])
    return rows


def count_of(result: Estimate) -> str:
    """Return the number of seeds of a result, as text that stays on one line."""
    return f"n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{result.n}"


def result_cell(path: str, result: Estimate | None) -> Cell | None:
    """Return the cell of a result; an interval has the number of seeds next to it."""
    if result is None:
        return None
    cell = Cell(format_metric(path, result.value), format_interval(path, result.interval))
    return cell._replace(interval=f"{cell.interval} {count_of(result)}") if cell.interval else cell


def difference_tables(
    groups: Sequence[Group], labels: dict[str, str], translate: Translate
) -> list[Table]:
    """Return the table of the differences of the other groups from the first one, if any.

    Groups with a single seed have no column. There is no table if the first group is one of them.
    """
    first, *others = zip(groups, group_labels(groups, translate), strict=True)
    compared = [(group, name) for group, name in others if len(group.runs) > 1]
    caption = translate("Differences from {name}", name=first[1])
    rows = []
    for path, label in labels.items():
        differences = [group.difference(first[0], path) for group, _ in compared]
        if any(differences):
            cells = [
                each and difference_cell(path, each.value, each.interval, count_of(each))
                for each in differences
            ]
            rows.append([translate(label), *cells])
    if not rows:
        return []
    return [Table(caption, ["", *(name for _, name in compared)], rows)]


def seed_tables(
    groups: Sequence[Group], labels: dict[str, str], translate: Translate
) -> list[Table]:
    """Return the table of each group with several seeds: a row of results per seed."""
    tables = []
    for name, group in zip(group_labels(groups, translate), groups, strict=True):
        metrics = [path for path in labels if group.values(path)]
        if len(group.runs) > 1:
            rows = [
                [
                    str(run.seed),
                    *(
                        metric_cell(path, result.value) if (result := run.result(path)) else None
                        for path in metrics
                    ),
                ]
                for run in group.runs
            ]
            head = [translate("seed"), *(translate(labels[path]) for path in metrics)]
            tables.append(Table(name, head, rows))
    return tables


def notes(differences: Sequence[Table], translate: Translate) -> Iterator[str]:
    """Yield notes on intervals and on the names of settings."""
    yield translate(
        "All intervals are 95 % intervals, and n is the number of seeds. Several seeds have their"
        " mean and Student's interval over the seeds, on a logit scale for fractions and on a"
        " logarithmic scale for perplexities, KL and lengths, so that it stays within their range;"
        " with two seeds, it is very wide. A single seed has, for metrics of responses, a bootstrap"
        " interval over prompts."
    )
    if differences:
        yield translate(
            "A difference is that of the means of two columns with several seeds each, with Welch's"
            " interval; n is the smaller number of seeds. ▲ and ▼ mark an interval that excludes 0,"
            " for the better and for the worse; pp: percentage points. Among many differences, some"
            " are marked by chance."
        )
    yield translate(
        "Settings of earlier jobs have the rule of the job as a prefix. A > B is job B before job"
        " A. The entries of datasets and models that only one column uses are listed by name only."
    )


if __name__ == "__main__":
    run(main)
