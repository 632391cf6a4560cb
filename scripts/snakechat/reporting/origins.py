"""Where the data and models of a lineage come from, as text and as a table."""

import shlex
from collections.abc import Mapping
from typing import Any

from snakechat.reporting.labels import N_
from snakechat.reporting.page_parts import Section, Table
from snakechat.reporting.translations import translate
from snakechat.workflow.lineage import Lineage, upstream_first

# The columns of the lineage.
HEAD = (N_("job"), N_("rule"), N_("inputs"), N_("source"), N_("spec"), N_("accepted changes"))


def rebuild_command(path: str, run: Mapping[str, Any]) -> str:
    """Return the command that builds a result as its run did."""
    options = shlex.join(run["options"].get("snakemake", ()))
    return f"snakemake --cores 1 {path} {options}".rstrip()


def describe_origin(entry: Mapping[str, Any], license: str | None = None) -> str:
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


def lineage_section(lineage: Lineage, licenses: Mapping[str, str | None]) -> Section:
    """Return the table of the jobs that a report was made from, each below its inputs.

    licenses: The licences of the sources, by path.
    """
    rows = [
        [
            path.removeprefix("output/"),
            lineage[path]["rule"],
            ", ".join(each.removeprefix("output/") for each in lineage[path]["inputs"]),
            describe_origin(lineage[path], licenses.get(path)),
            lineage[path]["spec"][:16],
            accepted_changes(lineage[path]),
        ]
        for path in upstream_first(lineage)
    ]
    note = translate(
        "A spec is the digest of a job's settings, code and inputs. The table shows its first"
        " 16 digits."
    )
    table = Table("", list(map(translate, HEAD)), rows, note, has_texts=True)
    return Section(translate("Lineage"), tables=[table])


def accepted_changes(job: Mapping[str, Any]) -> str:
    """Describe the changes after which a result was accepted (scripts/accept.py)."""
    return ", ".join(
        f"{entry['date']}: {entry['because']} ({'; '.join(entry['changes'])})"
        for entry in job.get("accepted", ())
    )
