"""What the card (README.md) of a dataset or a model declares in its metadata, and licences.

No library but a YAML parser: the workflow imports this module while it plans. Cards are files of
strangers.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from snakechat.data.model_files import CARD
from snakechat.workflow.limited_yaml import load_yaml
from snakechat.workflow.manifest import Lineage

METADATA = re.compile(r"\A\s*---\r?\n(.*?)\r?\n---\s*$", re.DOTALL | re.MULTILINE)
# Metadata are at the start of a card; a file of a stranger may be of any size.
MAX_BYTES = 1 << 20
# The rules whose results come from outside of the build, unless they generate them.
SOURCE_RULES = ("import_dataset", "fetch_model")


def card_facts(folder: Path) -> dict[str, Any]:
    """Return the licence (or None) that the card in a folder declares.

    A licence that the Hub does not know is "other (NAME)". Only words are returned, because they
    appear in generated pages.
    """
    metadata = _metadata(folder / CARD)
    license = normalized_license(metadata.get("license"))
    if license == "other":
        name = normalized_license(metadata.get("license_name"))
        license = f"other ({name})" if name else license
    return {"licence": license}


def card_configs(folder: Path) -> Any:
    """Return what the card in a folder says of the configs of a dataset, or None."""
    return _metadata(folder / CARD).get("configs")


def _metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a card; {} if there are none that can be read."""
    try:
        with path.open("rb") as file:
            found = METADATA.match(file.read(MAX_BYTES).decode("utf-8-sig", "replace"))
        metadata = load_yaml(found[1]) if found else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def normalized_license(text: Any) -> str | None:
    """Return the identifier of a licence in lower case, or None if it is not a single word.

    Identifiers come from cards of strangers and appear in generated pages.
    """
    is_word = isinstance(text, str) and re.fullmatch(r"[\w.+-]+", text)
    return text.lower() if is_word else None


def source_licenses(lineage: Lineage, declared: Mapping[str, str]) -> dict[str, str | None]:
    """Return the licence of each external dataset and model of a lineage, by path.

    declared: Licences that the config declares, by path; the others are those that were recorded.
    """
    return {
        path: declared.get(path) or entry["facts"].get("licence")
        for path, entry in lineage.items()
        if entry["rule"] in SOURCE_RULES and "generate" not in entry["settings"]
    }
