"""A statement of the training data, in the order of the European Union's template.

The template is that of the public summary of training content (Regulation (EU) 2024/1689, Article
53(1)(d)): general information, the list of data sources, data processing. What the build cannot
know, such as how local files were collected, is left to the provider of the model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from snakechat.data.licenses import license_remarks, source_name
from snakechat.reporting.data_sources import LABEL, SELECT, DataSource, data_sources
from snakechat.reporting.formatting import format_significant
from snakechat.reporting.labels import REMOVED_ROWS
from snakechat.reporting.origins import describe_origin
from snakechat.reporting.page_parts import Section, Table
from snakechat.reporting.translations import Translate
from snakechat.workflow.lineage import Lineage


def statement_sections(
    path: str, lineage: Lineage, licenses: Mapping[str, str | None], translate: Translate
) -> list[Section]:
    """Return the sections of the statement of a model.

    Args:
        path: Path of the training: output/STAGE/NAME.
        lineage: All upstream jobs of the report.
        licenses: The licence of each external dataset and model, by path.
    """
    sources = data_sources(lineage, licenses)
    kinds = {kind: [of for of in sources if of.kind == kind] for kind in ("hub", "local")}
    return [
        general_section(path, lineage, licenses, sources, translate),
        Section(
            translate("2.1 Publicly available datasets"),
            remarks=[] if kinds["hub"] else [translate("None.")],
            shown_tables=source_tables(kinds["hub"], translate("repository"), translate),
        ),
        Section(
            translate("2.2 to 2.4 Private, crawled and user data; 2.6 Other sources"),
            remarks=[
                translate("Whoever publishes the model states how these files were obtained.")
                if kinds["local"]
                else translate("None: the build reads no local files, and crawls nothing.")
            ],
            shown_tables=source_tables(kinds["local"], translate("files"), translate),
        ),
        synthetic_section([of for of in sources if of.kind == "synthetic"], translate),
        processing_section(sources, translate),
    ]


def general_section(
    path: str,
    lineage: Lineage,
    licenses: Mapping[str, str | None],
    sources: Sequence[DataSource],
    translate: Translate,
) -> Section:
    """Return the section of the model, the sizes of its data, its languages and licences."""
    models = {
        entry["name"]: describe_origin(entry, licenses.get(of), translate)
        for of, entry in lineage.items()
        if entry["rule"] in ("fetch_model", "init_model")
    }
    languages = sorted({language for source in sources for language in source.languages})
    rows = sum(sum(source.rows.values()) for source in sources)
    characters = sum(source.characters or 0 for source in sources)
    facts = [
        [translate("model"), path.removeprefix("output/")],
        *([f"{translate('base model')}: {name}", origin] for name, origin in models.items()),
        [translate("modality"), translate("text")],
        [
            translate("size of the data"),
            translate(
                "{rows} rows, {characters} characters",
                rows=format_significant(rows),
                characters=format_significant(characters),
            ),
        ],
        [translate("declared languages"), ", ".join(languages) or translate("none")],
    ]
    by_name = {source_name(of): license for of, license in licenses.items()}
    remarks = license_remarks(by_name, path.rpartition("/")[2])
    return Section(
        translate("1 General information"),
        remarks=[translate(remark.template, **remark.values) for remark in remarks],
        shown_tables=[Table("", [], facts)],
    )


def source_tables(sources: Sequence[DataSource], origin: str, translate: Translate) -> list[Table]:
    """Return the table of external datasets; none if there are no such datasets."""
    head = [translate("dataset"), origin, translate("licence"), translate("languages")]
    rows = [
        [
            source.name,
            describe_origin(source.job, translate=translate),
            source.license or translate("unknown"),
            ", ".join(source.languages),
            *sizes(source),
        ]
        for source in sources
    ]
    return [Table("", [*head, *size_names(translate)], rows, stack=True)] if rows else []


def size_names(translate: Translate) -> list[str]:
    """Return the heads of the cells of `sizes`."""
    return [translate("training rows"), translate("eval rows"), translate("characters")]


def sizes(source: DataSource) -> list[Any]:
    """Return cells of the rows of a dataset in each split and of its characters."""
    return [source.rows.get("train"), source.rows.get("eval"), source.characters]


def synthetic_section(sources: Sequence[DataSource], translate: Translate) -> Section:
    """Return the section of the data that the build generated."""
    rows = [[source.name, generator(source.job, translate), *sizes(source)] for source in sources]
    head = [translate("dataset"), translate("generated by"), *size_names(translate)]
    return Section(
        translate("2.5 Synthetic data"),
        remarks=[] if rows else [translate("None.")],
        shown_tables=[Table("", head, rows, stack=True)] if rows else [],
        caption=translate(
            "Responses that RLHF samples during training are not listed: no file keeps them all."
        )
        if rows
        else "",
    )


def generator(job: Mapping[str, Any], translate: Translate) -> str:
    """Describe what generated a dataset: a recipe of generations, a judge or a generator."""
    if job["rule"] == SELECT:
        scores = next(path for path in job["inputs"] if path.startswith("output/scores/"))
        return f"generations/{scores.rpartition('/')[2]}"
    if job["rule"] == LABEL:
        return str(job["settings"]["llm_judges"][job["settings"]["llm_judge"]]["model"])
    return describe_origin(job, translate=translate)


def processing_section(sources: Sequence[DataSource], translate: Translate) -> Section:
    """Return the section of what was removed, of the split and of overlaps between phases."""
    removed = [
        [source.name, translate(reason) if reason in REMOVED_ROWS else reason, count]
        for source in sources
        for reason, count in source.removed.items()
        if count
    ]
    splits = [
        [f"{source.name}: {phase}", of["rows"], overlaps(of)]
        for source in sources
        for phase, of in source.phases.items()
        if of["rows"]
    ]
    none = Table(translate("Removed rows"), [], [[translate("none")]])
    return Section(
        translate("3 Data processing"),
        remarks=[
            translate(
                "The build does not look for reservations of rights or for illegal content: it"
                " removes what the config names."
            )
        ],
        shown_tables=[
            Table(
                translate("Removed rows"),
                [translate("dataset"), translate("reason"), translate("rows")],
                removed,
            )
            if removed
            else none,
            Table(
                translate("Splits"),
                [translate("dataset and phase"), translate("rows"), translate("prompts also in")],
                splits,
                stack=True,
            ),
        ],
    )


def overlaps(phase: Mapping[str, Any]) -> str:
    """Describe which other phases have prompts of a phase: reward.train 12, rlhf.train 3."""
    shared = phase.get("rows_whose_prompt_is_in", {})
    return ", ".join(f"{other} {format_significant(count)}" for other, count in shared.items())
