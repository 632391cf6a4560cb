"""The error of the config, and hints about names that it does not have."""

import difflib
from collections.abc import Collection

from snakechat.workflow.errors import InputError


class ConfigError(InputError):
    """A mistake in the config; the message is one line for the user."""


def available(name: str, names: Collection[str]) -> str:
    """Return the names that exist, in parentheses, for an error about one that does not."""
    similar = difflib.get_close_matches(name, names, n=1)
    guess = f"did you mean {similar[0]}? " if similar else ""
    return f"({guess}available: {', '.join(sorted(names)) or 'none'})"


def new_entry(section: str) -> str:
    """Return how a section gets an entry for files; an empty text for other sections."""
    if section not in ("datasets", "models"):
        return ""
    return f": {section} needs an entry with the path of your files, or their name on the Hub (hub)"
