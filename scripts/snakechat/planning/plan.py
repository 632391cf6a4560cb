"""The jobs of a build that is planned and not run yet."""

from collections.abc import Mapping
from typing import NamedTuple

from snakechat.planning.dry_run import PlannedJob


class Plan(NamedTuple):
    """The planned jobs.

    jobs: All jobs of the build by the path of their result, up-to-date ones included.
    stale: Paths of the results that the build would make.
    """

    jobs: Mapping[str, PlannedJob]
    stale: set[str]
