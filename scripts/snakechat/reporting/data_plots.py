"""The data chapter of a report: rows of each phase, lengths, repeated prompts."""

from collections.abc import Mapping
from typing import Any

from snakechat.reporting.formatting import format_significant
from snakechat.reporting.interpretation import data_remarks
from snakechat.reporting.page_parts import Section, Table, metric_cell
from snakechat.reporting.plots import Panel, draw_bars, draw_quantiles
from snakechat.reporting.translations import Translate

Statistics = Mapping[str, Any]
# The fraction in whose format shares of rows are shown.
SHARE = "ties"


def data_sections(
    statistics: Mapping[str, Statistics], stages: tuple[str, ...], translate: Translate
) -> list[Section]:
    """Return the sections of the data of a recipe.

    statistics: stats.json of each job, by input name (records.DATASET, rows.DATASET,
        tokens.STAGE).
    """
    tokens = {
        stage: statistics[f"tokens.{stage}"]["train"]
        for stage in stages
        if f"tokens.{stage}" in statistics
    }
    return [phase_section(tokens, translate), prompt_section(statistics, translate)]


def phase_section(tokens: Mapping[str, Statistics], translate: Translate) -> Section:
    """Return the section of the training rows of each phase and of their lengths."""
    complete, truncated = translate("complete"), translate("truncated")
    counts = {
        stage: {
            complete: phase["rows"] - sum(phase["truncated"].values()),
            **{f"{truncated}: {what}": count for what, count in phase["truncated"].items()},
            **phase["dropped"],
        }
        for stage, phase in tokens.items()
    }
    kinds = list(dict.fromkeys(kind for of in counts.values() for kind in of))
    quantiles = {
        f"{stage}: {translate(name)}": lengths
        for stage, phase in tokens.items()
        for name, lengths in phase["tokens"].items()
    }
    rows_title, length_title = translate("training rows"), translate("lengths (tokens)")
    panels = [
        Panel(rows_title, draw_bars(rows_title, counts, stacked=True)),
        Panel(
            length_title,
            draw_quantiles(length_title, quantiles),
            translate(
                "Thick bars reach from 10 to 90 % of the rows, thin lines from 1 to 99 %; the"
                " mark is the median."
            ),
        ),
    ]
    rows = [[stage, *(of.get(kind, 0) for kind in kinds)] for stage, of in counts.items()]
    names = ("mean", "p1", "p10", "p50", "p90", "p99", "p100")
    lengths = [[label, *(of[name] for name in names)] for label, of in quantiles.items()]
    return Section(
        translate("Rows of each phase"),
        panels=panels,
        legend=kinds,
        kind="bars",
        tables=[
            Table(rows_title, ["", *kinds], rows),
            Table(
                length_title, ["", translate("mean"), *names[1:-1], translate("maximum")], lengths
            ),
        ],
    )


def prompt_section(statistics: Mapping[str, Statistics], translate: Translate) -> Section:
    """Return the section of repeated and shared prompts, and of which response is longer."""
    names = [name.partition(".")[2] for name in statistics if name.startswith("records.")]
    labels = [
        translate("prompt of an earlier row"),
        translate("prompt also in another phase"),
        translate("chosen response is the longer one"),
    ]
    shares = {name: prompt_shares(statistics, name) for name in names}
    bars: dict[str, dict[str, float | None]] = {
        name: dict(zip(labels, of, strict=True)) for name, of in shares.items()
    }
    title = translate("share of training rows")
    rows = [
        [
            name,
            format_significant(statistics[f"records.{name}"]["train"]["rows"]),
            *(metric_cell(SHARE, share) for share in of),
        ]
        for name, of in shares.items()
    ]
    return Section(
        translate("Prompts of each dataset"),
        remarks=list(data_remarks({name: of[:2] for name, of in shares.items()}, translate)),
        panels=[Panel(title, draw_bars(title, bars, percent=True))],
        legend=labels,
        kind="bars",
        tables=[Table(title, ["", translate("rows"), *labels], rows)],
    )


def prompt_shares(
    statistics: Mapping[str, Statistics], name: str
) -> tuple[float, float, float | None]:
    """Return shares of a dataset's rows: a repeated prompt, one of another phase, chosen longer."""
    records = statistics[f"records.{name}"]["train"]
    trained = {
        key: split for key, split in statistics[f"rows.{name}"].items() if key.endswith(".train")
    }
    # Of the training rows of each phase, the largest overlap with another phase.
    shared = sum(
        max(split.get("rows_whose_prompt_is_in", {}).get(other, 0) for other in trained)
        for split in trained.values()
    )
    rows = sum(split["rows"] for split in trained.values())
    return (
        records["repeated_prompts"] / records["rows"],
        shared / max(rows, 1),
        records.get("chosen_longer_share"),
    )
