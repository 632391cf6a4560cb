"""Licences of datasets and models, as declared in the config or on their cards.

Standard library only: the workflow imports this module while it plans.
"""

import re
from collections.abc import Mapping
from typing import Any

from snakechat.workflow.lineage import Lineage

# The rules whose results come from outside of the build, unless they generate them.
SOURCE_RULES = ("import_dataset", "fetch_model")


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
