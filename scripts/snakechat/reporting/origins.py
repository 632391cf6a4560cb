"""Where the data and models of a lineage come from, as text."""

import shlex
from collections.abc import Mapping
from typing import Any

from snakechat.reporting.translations import translate


def rebuild_command(path: str, run: Mapping[str, Any]) -> str:
    """Return the command that builds a result as its run did."""
    options = shlex.join(run["options"].get("snakemake", ()))
    return f"snakemake --cores 1 {path} {options}".rstrip()


def describe_origin(
    entry: Mapping[str, Any],
    license: str | None = None,
) -> str:
    """Describe the external source of a job in the lineage, or the parameters that generated it.

    Returns "" if all inputs of the job are jobs.

    license: Licence of the source. It is appended if given.
    """
    settings, files = entry["settings"], entry["files"]
    if "hub" in settings:
        # The commit, because a revision may be a branch.
        commit = entry["facts"].get("commit", settings["revision"])
        origin = f"{settings['hub']} @ {commit}"
    elif files["number"]:
        origin = translate(
            "{number} files, digest {digest}", number=files["number"], digest=files["digest"][:16]
        )
    elif "generate" in settings:
        origin = translate(
            "generated ({generator}, seed {seed})",
            generator=settings["generate"],
            seed=settings["seed"],
        )
    elif "init" in settings:
        origin = translate("random weights (seed {seed})", seed=settings["seed"])
    else:
        return ""
    return origin + (translate(", licence {license}", license=license) if license else "")
