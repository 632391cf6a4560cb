"""Descriptions of jobs: what a result is made from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.config.recipes import Job as Job

Jobs = dict[str, Job]


class Description(NamedTuple):
    """What a job is made from, apart from its code and the pinned libraries.

    Attributes:
        settings: JSON values that the program reads.
        inputs: Upstream jobs by the keys that the program uses for them.
        files: External files by the names that the spec has for them; of a file that is not local,
            its digest.
    """

    settings: dict[str, Any]
    inputs: Mapping[str, Job] = {}
    files: Mapping[str, Path | str] = {}
