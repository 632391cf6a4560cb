"""Licences of datasets and models, and the conditions under which their combination is published.

The conditions are those of tables/licenses.toml. They are facts to look up, not legal advice.

Standard library only: the workflow imports this module while it plans.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from snakechat.workflow.lineage import Lineage

# The file that code digests find by this name (snakechat.workflow.code_digests).
TABLE = "licenses.toml"
# The rules whose results come from outside of the build.
SOURCE_RULES = ("import_dataset", "fetch_model")

Kind = Literal["unknown", "non_commercial", "no_derivatives", "share_alike", "name", "notice"]


def N_(text: str) -> str:
    """Mark a text for translation (scripts/update_translations.py)."""
    return text


# What each kind of remark says. Only a notice is no conflict: it cannot be checked here.
TEXTS: dict[Kind, str] = {
    "unknown": N_("The licence of {sources} is not known: set `license`."),
    "non_commercial": N_("No commercial use: {sources}."),
    "no_derivatives": N_("No derived works: {sources}."),
    "share_alike": N_(
        "{sources} requires derived works under the same licence, which {others} does not allow."
    ),
    "name": N_("The name of a published model has to start with “{prefix}”: {sources}."),
    "notice": N_("A published model has to say “{notice}”: {sources}."),
}


class Conditions(NamedTuple):
    """The conditions of a licence: see tables/licenses.toml. Aliases have the same `license`."""

    license: str
    non_commercial: bool = False
    no_derivatives: bool = False
    share_alike: bool = False
    restricted: bool = False
    compatible: tuple[str, ...] = ()
    notice: str = ""
    name_prefix: str = ""


class Remark(NamedTuple):
    """A conflict or a duty that follows from the licences of the sources of a model.

    Attributes:
        kind: What it is about; its text is TEXTS[kind].
        values: The values of the placeholders of the text.
    """

    kind: Kind
    values: dict[str, str]

    @property
    def is_conflict(self) -> bool:
        """Whether `licenses: strict` makes it an error."""
        return self.kind != "notice"

    @property
    def template(self) -> str:
        """The text, with placeholders."""
        return TEXTS[self.kind]

    def text(self) -> str:
        """Return the remark in English."""
        return self.template.format(**self.values)


def normalized_license(text: Any) -> str | None:
    """Return the identifier of a licence in lower case, or None if it is not a single word.

    Identifiers come from cards of strangers and appear in generated pages.
    """
    is_word = isinstance(text, str) and re.fullmatch(r"[\w.+-]+", text)
    return text.lower() if is_word else None


@cache
def conditions_of(license: str | None) -> Conditions | None:
    """Return the conditions of a licence, or None if the table does not have it."""
    entry = _table().get(license or "")
    return None if entry is None else Conditions(**entry)


@cache
def _table() -> dict[str, dict[str, Any]]:
    table = tomllib.loads(Path(__file__).with_name("tables").joinpath(TABLE).read_text())
    entries: dict[str, dict[str, Any]] = {name: {"license": name} for name in table["permissive"]}
    for condition in ("non_commercial", "restricted"):
        entries |= {name: {"license": name, condition: True} for name in table[condition]}
    for name, entry in table["licenses"].items():
        for alias in (name, *entry.pop("aliases", ())):
            entries[alias] = {"license": name, **entry}
    return entries


def license_remarks(sources: Mapping[str, str | None], name: str) -> list[Remark]:
    """Return the conflicts and duties of a model.

    Args:
        sources: The licence of each dataset and model that it is made from, by a name for people;
            None where it is not known. Sources that the build itself generates are not among them.
        name: The name of the model.
    """
    known = {
        source: conditions
        for source, license in sources.items()
        if (conditions := conditions_of(license)) is not None
    }
    remarks = []
    if unknown := {source: sources[source] for source in sources if source not in known}:
        remarks.append(Remark("unknown", {"sources": _listed(unknown)}))
    kinds: tuple[Kind, ...] = ("non_commercial", "no_derivatives")
    for kind in kinds:
        if found := [source for source in known if getattr(known[source], kind)]:
            remarks.append(Remark(kind, {"sources": _listed({s: sources[s] for s in found})}))
    remarks += _share_alike(sources, known)
    remarks += _duties(sources, known, name)
    return remarks


def _share_alike(
    sources: Mapping[str, str | None], known: Mapping[str, Conditions]
) -> Iterator[Remark]:
    """Yield a remark for each share-alike licence that other sources do not fit."""
    licenses = {sources[source] for source in known if known[source].share_alike}
    reported: set[frozenset[str | None]] = set()
    for license in sorted(filter(None, licenses)):
        conditions = conditions_of(license)
        assert conditions is not None
        others = {
            source: sources[source]
            for source, other in known.items()
            if frozenset((license, sources[source])) not in reported
            and not _fits(conditions, other)
        }
        if others:
            reported |= {frozenset((license, other)) for other in others.values()}
            own = {source: license for source in known if sources[source] == license}
            yield Remark("share_alike", {"sources": _listed(own), "others": _listed(others)})


def _fits(conditions: Conditions, of_other: Conditions) -> bool:
    """Return whether a source may be part of a work under a share-alike licence, or vice versa."""
    if conditions.license == of_other.license:
        return True
    if of_other.license in conditions.compatible or conditions.license in of_other.compatible:
        return True
    demands = of_other.share_alike or of_other.no_derivatives or of_other.restricted
    return not demands and (conditions.non_commercial or not of_other.non_commercial)


def _duties(
    sources: Mapping[str, str | None], known: Mapping[str, Conditions], name: str
) -> Iterator[Remark]:
    """Yield what a published model has to say and how its name starts."""
    plain = re.sub(r"[-_. ]", "", name).lower()
    for prefix in sorted({of.name_prefix for of in known.values()} - {""}):
        if not plain.startswith(prefix.replace(" ", "").lower()):
            found = {s: sources[s] for s, of in known.items() if of.name_prefix == prefix}
            yield Remark("name", {"sources": _listed(found), "prefix": prefix})
    for notice in sorted({of.notice for of in known.values()} - {""}):
        found = {s: sources[s] for s, of in known.items() if of.notice == notice}
        yield Remark("notice", {"sources": _listed(found), "notice": notice})


def _listed(sources: Mapping[str, str | None]) -> str:
    """Return sources with their licences: a (mit), b."""
    return ", ".join(
        f"{source} ({license})" if license else source for source, license in sources.items()
    )


def is_hub_license(license: str) -> bool:
    """Return whether the Hugging Face Hub takes an identifier of a licence in cards."""
    text = Path(__file__).with_name("tables").joinpath("hub_licenses.txt").read_text()
    return license in {
        word for line in text.splitlines() if not line.startswith("#") for word in line.split()
    }


def is_source(rule: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a job reads a dataset or a model that the build does not generate itself."""
    return rule in SOURCE_RULES and "generate" not in settings


def source_name(path: str) -> str:
    """Return the name of a source for people: data/NAME or models/NAME."""
    return path.removeprefix("output/")


def source_licenses(lineage: Lineage, declared: Mapping[str, str]) -> dict[str, str | None]:
    """Return the licence of each external dataset and model of a lineage, by path.

    declared: Licences that the config declares, by path; the others are those that were recorded.
    """
    return {
        path: declared.get(path) or normalized_license(entry["facts"].get("licence"))
        for path, entry in lineage.items()
        if is_source(entry["rule"], entry["settings"])
    }
