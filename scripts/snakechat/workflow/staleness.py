"""Decides which results are stale, and shows it to Snakemake as file times.

A result is up to date if its manifest holds today's spec and the digests of today's inputs, and its
files are there. An input that is stale itself is rebuilt first; its readers then run, and keep
their results if its content is the same (snakechat.workflow.job). Snakemake looks at nothing but
times (profiles/default), so a stale result gets an old time, and a result that is up to date gets
one that is as new as everything it is made from.

Standard library only: the workflow imports this module while it plans.
"""

import errno
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from snakechat.workflow.digests import digest, write_atomically
from snakechat.workflow.errors import InputError
from snakechat.workflow.lineage import Lineage
from snakechat.workflow.manifest import (
    content_digest,
    input_digest,
    manifest_path,
    parse_manifest,
    read_manifest,
)
from snakechat.workflow.specs import Specs, spec_path

# The time of a stale result, in ns. Snakemake takes 0 for no time at all.
STALE = 10**9


class Staleness:
    """The state of results on disk, compared with their specs.

    Args:
        specs: The specs of all jobs.
        pages: Suffix of the page that a rule puts next to its result, by rule.
        reporting: Whether Snakemake writes a report, which shows results as they are on disk.
    """

    def __init__(self, specs: Specs, pages: dict[str, str], reporting: bool) -> None:
        self.specs, self.pages, self.reporting = specs, pages, reporting
        # Names of the reward functions that planned jobs run.
        self.reward_functions: set[str] = set()
        # Times of the inputs of results that do not exist, by result folder.
        self._missing: dict[str, int] = {}
        self.spec_file = cache(self._spec_file)
        self._manifest = cache(lambda result: read_manifest(manifest_path(result)))

    def _spec_file(self, rule: str, name: str) -> str:
        """Write a job's spec if it is new, set the times of its result, and return its path.

        Raises:
            InputError: The spec or the result cannot be written.
        """
        spec, spec_digest = self.specs.spec(rule, name)
        path = spec_path(rule, name, spec_digest)
        for upstream in spec["inputs"].values():
            self.spec_file(upstream["rule"], upstream["name"])
        try:
            text = json.dumps(spec, indent=1, sort_keys=True) + "\n"
            if not path.exists() or path.read_text(errors="replace") != text:
                # Jobs compare a spec file with its name, and planning writes it again.
                write_atomically(path, text, durable=False)
            self._set_times(spec, path)
        except OSError as error:
            raise InputError(f"{spec['path']} cannot be written: {error.strerror}") from None
        return str(path)

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

    def _set_times(self, spec: dict[str, Any], spec_file: Path) -> None:
        """Set the time of a result and of its page according to its state.

        A result that is up to date becomes at least as new as its spec and its inputs, whatever has
        been touched, copied or replaced since.
        """
        manifest = Path(f"{spec['path']}.manifest.json")
        input_times = [self._time(upstream["path"]) for upstream in spec["inputs"].values()]
        newest = max(spec_file.stat().st_mtime_ns, *input_times, 0)
        if not manifest.exists():
            self._add_reward_functions(spec)
            self._missing[spec["path"]] = newest
            if manifest.parent.exists() and not os.access(manifest.parent, os.W_OK):
                raise PermissionError(errno.EACCES, "its folder is read-only")
            self._set_page_time(spec, STALE)
            return
        with open(manifest, errors="replace") as file:
            current = os.stat(file.fileno()).st_mtime_ns
            wanted = STALE
            if self.is_up_to_date(spec, parse_manifest(file.read())):
                wanted = max(current, newest)
            else:
                self._add_reward_functions(spec)
                self.require_report_input(spec["path"], complete=True)
            if wanted != current:
                # Through the open file: a build may be replacing the manifest at this moment.
                os.utime(file.fileno(), ns=(wanted, wanted))
        self._set_page_time(spec, wanted)

    def _add_reward_functions(self, spec: dict[str, Any]) -> None:
        self.reward_functions |= set(spec["settings"].get("reward_functions", ()))

    def _time(self, result: str) -> int:
        """Return the time of a result; of a missing one, that of its newest input.

        Snakemake looks through a missing result at the inputs behind it.
        """
        manifest = Path(f"{result}.manifest.json")
        return manifest.stat().st_mtime_ns if manifest.exists() else self._missing[result]

    def _set_page_time(self, spec: dict[str, Any], time: int) -> None:
        """Give the page next to a result, if any, the time of the result."""
        page = Path(f"{spec['path']}{self.pages.get(spec['rule'], '')}")
        if page.is_file() and page.stat().st_mtime_ns != time:
            os.utime(page, ns=(time, time))
