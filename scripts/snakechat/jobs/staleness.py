"""Decides which results are stale.

A result is up to date if its manifest holds today's spec and the digests of today's inputs, and its
files are there. An input that is stale itself is rebuilt first; its readers then run, and keep
their results if its content is the same (snakechat.workflow.job). Times of files decide nothing,
and a decision writes nothing.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from snakechat.jobs.specs import Specs
from snakechat.workflow.digests import digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.lineage import Lineage
from snakechat.workflow.manifest import (
    content_digest,
    input_digest,
    manifest_path,
)
from snakechat.workflow.valid_manifests import read_valid_manifest


class Staleness:
    """The state of results on disk, compared with their specs.

    Args:
        specs: The specs of all jobs.

    Attributes:
        reporting: Whether Snakemake writes a report, which shows results as they are on disk.
        stale: The specs of the results that exist and are stale, by the path of the result.
        incomplete: The missing manifests of the folders that exist without them, by folder.
    """

    def __init__(self, specs: Specs) -> None:
        self.specs, self.reporting = specs, False
        self.stale: dict[str, dict[str, Any]] = {}
        self.incomplete: dict[str, list[str]] = {}
        self.decide = cache(self._decide)
        self._manifest = cache(lambda result: read_valid_manifest(manifest_path(result)))

    def _decide(self, rule: str, name: str) -> None:
        """Decide whether the result of a job is stale.

        Raises:
            InputError: It is, and Snakemake writes a report.
        """
        spec, _ = self.specs.spec(rule, name)
        exists = manifest_path(spec["path"]).exists()
        if exists and not self.is_up_to_date(spec, self._manifest(spec["path"])):
            self.stale[spec["path"]] = spec
            self.require_report_input(spec["path"], complete=True)

    def start_report(self) -> None:
        """Require all results to be up to date from now on."""
        self.reporting = True

    def decide_folder(self, folder: str, manifests: Iterable[str]) -> None:
        """Decide whether a folder that users ask for lacks manifests.

        Raises:
            InputError: It does, and Snakemake writes a report.
        """
        missing = [path for path in manifests if not Path(path).exists()]
        if missing:
            self.require_report_input(folder, complete=False)
            if Path(folder).exists():
                self.incomplete[folder] = missing

    def is_up_to_date(self, spec: dict[str, Any], manifest: dict[str, Any] | None) -> bool:
        """Return whether a manifest describes a complete result of this spec and these inputs."""
        if manifest is None or digest(manifest["spec"]) != digest(spec):
            return False
        if manifest["inputs"].keys() != spec["inputs"].keys():
            return False
        for key, upstream in spec["inputs"].items():
            current = self._manifest(upstream["path"])
            if current is None:
                if not self._was_made_as_planned(upstream, manifest["lineage"]):
                    return False
            elif input_digest(spec, current) != manifest["inputs"][key]:
                return False
        for name, properties in manifest["files"].items():
            file = Path(spec["path"], name)
            if not file.is_file() or file.stat().st_size != properties["size"]:
                return False
        return True

    def _was_made_as_planned(self, upstream: Mapping[str, str], lineage: Lineage) -> bool:
        """Return whether a missing input of a result would be made as the lineage has it."""
        recorded = lineage.get(upstream["path"])
        spec, spec_digest = self.specs.spec(upstream["rule"], upstream["name"])
        if recorded is None or recorded["spec"] != spec_digest:
            return False
        for entry in spec["inputs"].values():
            current = self._manifest(entry["path"])
            if current is None:
                if not self._was_made_as_planned(entry, lineage):
                    return False
            elif content_digest(current) != lineage[entry["path"]]["content"]:
                return False
        return True

    def require_report_input(self, path: str, complete: bool) -> None:
        """Raise InputError if Snakemake writes a report and a result is not up to date."""
        if self.reporting:
            state = "stale" if complete else "incomplete"
            raise InputError(
                f"{path} is {state}, and a report shows results that are up to date: first run the"
                " same command with --cores 1 instead of --report (python scripts/explain.py prints"
                " what changed)"
            )
