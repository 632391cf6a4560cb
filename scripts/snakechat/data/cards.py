"""What the card (README.md) of a dataset or a model declares in its metadata.

No library but a YAML parser: the workflow imports this module while it plans. Cards are files of
strangers.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from snakechat.data.licenses import normalized_license
from snakechat.data.model_files import CARD
from snakechat.workflow.limited_yaml import load_yaml

METADATA = re.compile(r"\A\s*---\r?\n(.*?)\r?\n---\s*$", re.DOTALL | re.MULTILINE)
# Metadata are at the start of a card; a file of a stranger may be of any size.
MAX_BYTES = 1 << 20
LANGUAGE = re.compile(r"[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8})*")
MAX_LANGUAGES = 200


def card_facts(folder: Path) -> dict[str, Any]:
    """Return the licence (or None) and the languages that the card in a folder declares.

    A licence that the Hub does not know is "other (NAME)". Only words are returned, because they
    appear in generated pages.
    """
    metadata = _metadata(folder / CARD)
    license = normalized_license(metadata.get("license"))
    if license == "other":
        name = normalized_license(metadata.get("license_name"))
        license = f"other ({name})" if name else license
    facts: dict[str, Any] = {"licence": license}
    declared = metadata.get("language")
    languages = declared if isinstance(declared, list) else [declared]
    if known := [text for text in languages if isinstance(text, str) and LANGUAGE.fullmatch(text)]:
        facts["languages"] = known[:MAX_LANGUAGES]
    return facts


def card_configs(folder: Path) -> Any:
    """Return what the card in a folder says of the configs of a dataset, or None."""
    return _metadata(folder / CARD).get("configs")


def _metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a card; {} if there are none that can be read."""
    try:
        with path.open("rb") as file:
            found = METADATA.match(file.read(MAX_BYTES).decode())
        metadata = load_yaml(found[1]) if found else None
    # ValueError: also a card that is not UTF-8.
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return metadata if isinstance(metadata, dict) else {}
