"""The jobs of a build that is planned and not run yet."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from snakechat.workflow.placement import DEFAULTS, SERIAL, Placement, RunOptions


class PlannedJob(NamedTuple):
    """A job of a build.

    spec: Its spec. placement: Where and how it would run. options: What else its run would use.
    """

    spec: dict[str, Any]
    placement: Placement = SERIAL
    options: RunOptions = DEFAULTS


class Plan(NamedTuple):
    """The jobs of a build that is planned and not run yet.

    Attributes:
        jobs: All jobs by the path of their result, up-to-date ones included. Jobs follow those
            upstream.
        stale: Paths of the results that the build would make.
        targets: The targets of the command line.
    """

    jobs: Mapping[str, PlannedJob]
    stale: set[str]
    targets: Sequence[str] = ()

    @property
    def stale_jobs(self) -> dict[str, PlannedJob]:
        """The jobs that the build would run, by the path of their result."""
        return {path: job for path, job in self.jobs.items() if path in self.stale}


def upstream_paths(spec: Mapping[str, Any], jobs: Mapping[str, Any]) -> list[str]:
    """Return the paths of a job's inputs that are results of planned jobs."""
    paths = [entry["path"] for entry in spec["inputs"].values()]
    return [path for path in paths if path in jobs]
