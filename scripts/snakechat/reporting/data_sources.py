"""The datasets that a result was made from, with everything that its lineage says about them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from snakechat.workflow.lineage import Lineage

# What makes records, and where they come from.
IMPORT, SELECT, LABEL = "import_dataset", "select_responses", "label_pairs"


class DataSource(NamedTuple):
    """A dataset.

    Attributes:
        name: Its name in the config.
        kind: Whether it comes from the Hub, from local files, or from the build.
        license: Its licence, if known.
        languages: Those that its card declares.
        rows: Records by split; {} in results of earlier versions.
        removed: Rows of the source that no phase has, by reason.
        phases: Rows of each phase and split ("sft.train"), and how many of them have a prompt of
            another one.
    """

    name: str
    kind: Literal["hub", "local", "synthetic"]
    license: str | None
    languages: list[str]
    rows: dict[str, int]
    removed: dict[str, int]
    phases: dict[str, dict[str, Any]]


def data_sources(lineage: Lineage, licenses: Mapping[str, str | None]) -> list[DataSource]:
    """Return the datasets of a lineage, in the order of their names.

    licenses: The licence of each external source, by path.
    """
    return [
        data_source(lineage, path, licenses.get(path))
        for path, entry in sorted(lineage.items())
        if entry["rule"] in (IMPORT, SELECT, LABEL)
    ]


def data_source(lineage: Lineage, path: str, license: str | None) -> DataSource:
    """Return the dataset whose records are at a path."""
    entry = lineage[path]
    facts, split = entry["facts"], lineage.get(f"output/split/{entry['name']}", {"facts": {}})
    sizes = facts.get("size", {})
    removed: Counter[str] = Counter()
    for reasons in facts.get("dropped", {}).values():
        removed.update(reasons)
    if excluded := len(split["facts"].get("excluded", ())):
        removed["excluded"] = excluded
    return DataSource(
        name=entry["name"],
        kind=kind_of_data(entry),
        license=license,
        languages=facts.get("languages", []),
        rows={name: size["rows"] for name, size in sizes.items()},
        removed=dict(removed),
        phases=split["facts"].get("phases", {}),
    )


def kind_of_data(job: Mapping[str, Any]) -> Literal["hub", "local", "synthetic"]:
    """Return where a dataset comes from."""
    if job["rule"] in (SELECT, LABEL) or "generate" in job["settings"]:
        return "synthetic"
    return "hub" if "hub" in job["settings"] else "local"
