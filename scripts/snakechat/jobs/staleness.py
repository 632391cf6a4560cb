"""Decides which results are up to date.

A result is up to date if the store has it: its key is the digest of the job's spec and the content
of its inputs. Its path is a link, which may lead to another version: then the build changes the
link and runs no job. Times of files decide nothing, and a decision writes nothing.

The content of an input is known if the input is up to date itself. One that is stale is made first;
its readers then run, and find their result in the store if its content is the same
(snakechat.workflow.job).
"""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.jobs.specs import Specs
from snakechat.workflow.digests import digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.lineage import Lineage
from snakechat.workflow.manifest import (
    Manifest,
    content_digest,
    input_digest,
    manifest_path,
    read_manifest,
)
from snakechat.workflow.store import (
    STORE,
    Damaged,
    link_result,
    linked_folder,
    read_checked_manifest,
    store_key,
    stored_folder,
    stored_folders,
)


class Stored(NamedTuple):
    """A complete result in the store."""

    folder: Path
    manifest: Manifest


class Staleness:
    """The results that the store has of the jobs of today.

    Args:
        specs: The specs of all jobs.

    Attributes:
        reporting: Whether Snakemake writes a report, which shows results as they are on disk.
        stale: The specs of the results that exist and are stale, by the path of the result.
        incomplete: The missing manifests of the folders that exist without them, by folder.
        links: The results that are up to date and that their paths do not lead to, by path.
    """

    def __init__(self, specs: Specs) -> None:
        self.specs, self.reporting = specs, False
        self.stale: dict[str, dict[str, Any]] = {}
        self.incomplete: dict[str, list[str]] = {}
        self.links: dict[str, Path] = {}
        self.decide = cache(self._decide)
        self.result = cache(self._result)

    def _decide(self, rule: str, name: str) -> None:
        """Decide whether the result of a job is stale.

        Raises:
            InputError: It is, and Snakemake writes a report.
        """
        spec, _ = self.specs.spec(rule, name)
        path, stored = spec["path"], self.result(rule, name)
        exists = manifest_path(path).exists()
        if stored is None:
            if exists and not self._is_stale_by_inputs_alone(spec):
                self.stale[path] = spec
        elif linked_folder(path) != stored.folder or not exists:
            self.links[path] = stored.folder
        if exists and (path in self.stale or path in self.links):
            self.require_report_input(path, complete=True)

    def _is_stale_by_inputs_alone(self, spec: dict[str, Any]) -> bool:
        """Return whether a result is stale only because an existing input is made again first."""
        linked = read_manifest(manifest_path(spec["path"]))
        return (
            linked is not None
            and digest(linked["spec"]) == digest(spec)
            and any(
                self.result(up["rule"], up["name"]) is None and manifest_path(up["path"]).exists()
                for up in spec["inputs"].values()
            )
        )

    def link(self) -> None:
        """Have the paths of results lead to the versions that are up to date.

        Raises:
            InputError: A path has something else than a link.
        """
        for path, folder in self.links.items():
            link_result(path, folder)
        self.links.clear()

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

    def _result(self, rule: str, name: str) -> Stored | None:
        """Return the up-to-date result of a job, if the store has it."""
        spec, _ = self.specs.spec(rule, name)
        inputs = {key: self.result(up["rule"], up["name"]) for key, up in spec["inputs"].items()}
        digests = {
            key: input_digest(spec, stored.manifest)
            for key, stored in inputs.items()
            if stored is not None
        }
        place = stored_folder(STORE, rule, name, "")
        if len(digests) == len(inputs):
            return complete_result(place / store_key(spec, digests))
        # Inputs that were deleted: a result remains that was made from what they would be.
        for folder in stored_folders(place):
            found = complete_result(folder)
            if found is not None and self._has_inputs(found.manifest, spec, digests):
                return found
        return None

    def _has_inputs(
        self, manifest: Manifest, spec: Mapping[str, Any], digests: Mapping[str, str]
    ) -> bool:
        """Return whether a result was made by a job from its known and its deleted inputs.

        digests: Of the known ones.
        """
        return digest(manifest["spec"]) == digest(spec) and all(
            manifest["inputs"].get(key) == digests[key]
            if key in digests
            else self._was_made_as_planned(upstream, manifest["lineage"])
            for key, upstream in spec["inputs"].items()
        )

    def _was_made_as_planned(self, upstream: Mapping[str, str], lineage: Lineage) -> bool:
        """Return whether a missing input of a result would be made as the lineage has it."""
        recorded = lineage.get(upstream["path"])
        spec, spec_digest = self.specs.spec(upstream["rule"], upstream["name"])
        if recorded is None or recorded["spec"] != spec_digest:
            return False
        for entry in spec["inputs"].values():
            stored = self.result(entry["rule"], entry["name"])
            if stored is None:
                if not self._was_made_as_planned(entry, lineage):
                    return False
            elif content_digest(stored.manifest) != lineage[entry["path"]]["content"]:
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


def complete_result(folder: Path) -> Stored | None:
    """Return the result in a folder of the store, if its files exist and have their sizes."""
    try:
        manifest = read_checked_manifest(folder)
    except (Damaged, OSError):
        return None
    for name, properties in manifest["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != properties["size"]:
            return None
    return Stored(folder, manifest)
