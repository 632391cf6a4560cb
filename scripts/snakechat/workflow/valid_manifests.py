"""Manifests for planning and for the tools, which must survive any damage of the files.

Jobs read the manifests that planning found valid (snakechat.workflow.manifest). Standard library
only: the workflow imports this module while it plans.
"""

from pathlib import Path
from typing import Any

from snakechat.workflow.manifest import Manifest, read_manifest

# What readers rely on (`_has_form`).
FORM = {
    "spec": {
        **{"rule": str, "name": str, "path": str, "settings": dict},
        "inputs": {"*": {"rule": str, "name": str, "path": str}},
        **{"files": {"*": str}, "code": {"*": str}, "requirements": dict},
    },
    "inputs": {"*": str},
    "lineage": {
        "*": {
            **{"rule": str, "name": str, "settings": dict, "facts": dict},
            **{"spec": str, "content": str, "inputs": [str]},
        }
    },
    "facts": dict,
    "files": {"*": {"size": int, "sha256": str}},
}


# What scripts/accept.py adds to a manifest, and to its entry in lineages.
ACCEPTED = [{"because": str, "date": str, "changes": [str], "from": str, "to": str}]


def read_valid_manifest(path: str | Path) -> Manifest | None:
    """Return a manifest, or None if the file is missing or damaged in any way."""
    manifest = read_manifest(path)
    if manifest is None or not _has_form(manifest, FORM):
        return None
    accepting = [manifest, *manifest["lineage"].values()]
    is_valid = all(_has_form(each.get("accepted", []), ACCEPTED) for each in accepting)
    return manifest if is_valid else None


def _has_form(value: Any, form: Any) -> bool:
    """Return whether a JSON value has a form: a type, a list with the form of its items, a mapping.

    The key "*" of a mapping stands for all keys; a mapping may have further keys.
    """
    if isinstance(form, type):
        return type(value) is form
    if isinstance(form, list):
        return isinstance(value, list) and all(_has_form(item, form[0]) for item in value)
    if not isinstance(value, dict):
        return False
    if "*" in form:
        return all(_has_form(item, form["*"]) for item in value.values())
    return all(key in value and _has_form(value[key], inner) for key, inner in form.items())
