"""LLM judges, the models of the section `llm_judges`, which rate or compare responses.

What they are asked determines results and is part of specs; where and how fast they are asked is
not.

Standard library only: the workflow and the programs import this module.
"""

import itertools
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from snakechat.config.references import (
    JUDGES,
    RewardReferences,
    parse_reference,
    weighted_references,
)
from snakechat.workflow.errors import InputError

# Keys of a judge that determine its replies, and keys of the access to it; None has no default.
SETTINGS = {"model": None, "rubric": None, "scale": [1.0, 10.0], "parameters": {"temperature": 0}}
ACCESS = {
    "url": None,
    "key_env": None,
    "requests_per_minute": None,
    "concurrency": 8,
}

# Judges by name.
Judges = Mapping[str, Mapping[str, Any]]


def judge_names(*references: RewardReferences) -> list[str]:
    """Return the names of the LLM judges among values of `reward` or `judge`."""
    texts = itertools.chain(*map(weighted_references, references))
    found = (parse_reference(text) for text in texts)
    return list(dict.fromkeys(name for section, name in found if section == JUDGES))


def judge_settings(judges: Judges, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the settings of judges as specs have them, by name."""
    return _keys_of(judges, names, SETTINGS)


def judge_access(judges: Judges, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return where and how judges are asked, by name: an option of a run."""
    return _keys_of(judges, names, ACCESS)


def _keys_of(
    judges: Judges, names: Iterable[str], defaults: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    return {
        name: {key: judges[name].get(key, default) for key, default in defaults.items()}
        for name in names
    }


def check_keys(judges: Judges, names: Iterable[str]) -> None:
    """Check that the environment has the API keys of judges.

    Raises:
        InputError: As api_key does.
    """
    for name, access in judge_access(judges, sorted(names)).items():
        api_key(name, access["key_env"])


def api_key(name: str, key_env: str | None) -> str | None:
    """Return the API key of a judge; None if it needs none.

    Raises:
        InputError: The environment variable is not set, or is not an API key.
    """
    if key_env is None:
        return None
    key = os.environ.get(key_env, "").strip()
    # Error messages of the client quote a header with other characters.
    if not re.fullmatch("[!-~]+", key):
        raise InputError(
            f"{JUDGES}.{name}.key_env: environment variable {key_env} has no key: export it before"
            " the build"
        )
    return key
