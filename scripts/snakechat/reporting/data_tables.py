"""Tables of the data of a recipe: rows of each phase, lengths, repeated prompts."""

from collections.abc import Mapping
from typing import Any

from snakechat.reporting.formatting import format_number
from snakechat.reporting.metric_tables import figure_cell
from snakechat.reporting.metric_values import Figure
from snakechat.reporting.page_parts import Section, Table
from snakechat.reporting.translations import translate

Statistics = Mapping[str, Any]
QUANTILES = ("p1", "p10", "p50", "p90", "p99")


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
    rows = [
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
    head = ["", translate("rows"), translate("rows whose prompt another phase has")]
    note = translate(
        "If the reward phase and RLHF share prompts, scores during RLHF are optimistic. The setting"
        " split: {by: prompt} keeps all rows of a prompt in one phase."
    )
    phases = Table(translate("phases"), head, rows, note)
    rows = [
        [
            dataset,
            of["rows"],
            figure_cell("ties", Figure(of["repeated_prompts"] / of["rows"])),
            of.get("chosen_longer_share")
            and figure_cell("ties", Figure(of["chosen_longer_share"])),
        ]
        for dataset in datasets
        for of in [statistics[f"records.{dataset}"]["train"]]
    ]
    head = [
        "",
        translate("rows"),
        translate("prompt of an earlier row"),
        translate("chosen response is the longer one"),
    ]
    datasets_table = Table(translate("datasets"), head, rows)
    return Section(translate("Prompts of each dataset"), tables=[datasets_table, phases])
