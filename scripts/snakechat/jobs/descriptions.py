"""Descriptions of jobs: what a result is made from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.config.recipes import JobId

Jobs = dict[str, JobId]


class Description(NamedTuple):
    """What a job is made from, apart from its code and the pinned libraries, and where that is.

    Attributes:
        settings: JSON values that the program reads.
        inputs: Upstream jobs by the keys that the program uses for them.
        files: External files by the names that the spec has for them; of a file that is not local,
            its digest.
        options: RunOptions that this job has, such as the folder of the files. No result is made
            from them.
        program: Name of the program in scripts/ that runs in place of the rule's.
    """

    settings: dict[str, Any]
    inputs: Mapping[str, JobId] = {}
    files: Mapping[str, Path | str] = {}
    options: Mapping[str, Any] = {}
    program: str | None = None
