"""The file by which Snakemake runs the jobs that are stale.

It is an input of each job: a plain one of a job that is stale, and `ancient()` for one that is up
to date. It is newer than every output, until the first job of a build starts: Snakemake checks that
no input of a job is newer than its output.

Each build gives it new content, because Snakemake ignores the time of a file whose content it
knows. A dry run may be started beside a build and has a stamp of its own. Jobs on a cluster have
none: Snakemake is told which job to run there.
"""

import os
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snakemake.io import IOFile, ancient, local

from snakechat.workflow.digests import write_atomically
from snakechat.workflow.snapshot import MEMORY

# The last time that all file systems store.
LATEST = 2**31 - 1


def without_time(path: str) -> Any:
    """Return an input whose time makes no output stale."""
    return ancient(path)


def forget(workflow: Any, path: str) -> None:
    """Delete what Snakemake remembers of an output, which has become an earlier version."""
    workflow.persistence.cleanup_metadata(IOFile(path))


class Stamp:
    """The stamp of this process.

    Args:
        is_flagged: Whether Snakemake has to be told that the file stays in its place: in a module
            with a prefix, or beside a storage. The flag takes time at each job.

    Attributes:
        path: Its path.
        paths: The paths that it may have and had in this process.
        is_later: Whether jobs have started: Snakemake would miss its path among the inputs of
            another plan.
    """

    def __init__(self, is_flagged: bool) -> None:
        self._flag: Callable[[str], Any] = local if is_flagged else str
        self._of_builds, self.path = MEMORY / "build", MEMORY / "stale"
        self.is_later = False
        try:
            if not self.path.exists() or self.path.stat().st_mtime != LATEST:
                self._write("")
            self._fresh = self._of_builds if self._of_builds.exists() else self.path
        except OSError:
            # A folder that is read-only can be planned.
            self._file = tempfile.NamedTemporaryFile(prefix="stale-")  # noqa: SIM115
            self.path = self._fresh = Path(self._file.name)
            os.utime(self.path, (LATEST, LATEST))
        self.paths = {str(self._of_builds), str(self.path)}

    def begin_build(self) -> None:
        """Use the stamp of builds, with new content.

        Raises:
            OSError: It cannot be written.
        """
        self.path = self._fresh = self._of_builds
        self._write(uuid.uuid4().hex)

    def start_jobs(self) -> None:
        """Make the stamp older than what jobs will write.

        Jobs that are planned after a checkpoint have another one, which is newer again.
        """
        os.utime(self.path, (0, 0))
        self.is_later = True
        self.path = MEMORY / f"later-{len(self.paths)}"
        self.paths.add(str(self.path))
        self._write(uuid.uuid4().hex)

    def input(self, is_stale: bool) -> Any:
        """Return the input of a job."""
        path = self._flag(str(self.path if is_stale else self._fresh))
        return path if is_stale else without_time(path)

    def _write(self, content: str) -> None:
        write_atomically(self.path, content, durable=False)
        os.utime(self.path, (LATEST, LATEST))
