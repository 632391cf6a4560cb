"""The section of a report on the licences of what a model was made from."""

from collections.abc import Mapping

from snakechat.data.licenses import Remark, license_remarks, source_name
from snakechat.reporting.page_parts import Section, Table
from snakechat.reporting.translations import Translate


def license_section(licenses: Mapping[str, str | None], name: str, translate: Translate) -> Section:
    """Return the section of the licences of the sources of a model.

    Args:
        licenses: The licence of each external dataset and model, by path; None if unknown.
        name: The name of the model.
    """
    by_name = {source_name(path): license for path, license in licenses.items()}
    rows = [[source, license or translate("unknown")] for source, license in by_name.items()]
    title = translate("Licences")
    if not rows:
        return Section(title, remarks=[translate("The build generates all of its sources.")])
    return Section(
        title,
        remarks=[remark_text(remark, translate) for remark in license_remarks(by_name, name)],
        shown_tables=[Table("", [translate("source"), translate("licence")], rows)],
        caption=translate(
            "As declared in the config or on the card of the source. A list of well-known"
            " conditions, no legal advice."
        ),
    )


def remark_text(remark: Remark, translate: Translate) -> str:
    """Return a remark on licences in the language of the page."""
    return translate(remark.template, **remark.values)
