"""Snapshots of the sources and specs: a build runs what it was planned with.

output/code/DIGEST/ is a copy of the files that jobs run, named after their content. An edit of the
sources while a build runs changes none of its jobs, and bytecode always belongs to its source.

On a cluster, Snakemake plans again in each job. output/code/DIGEST.json says with what: the
snapshot and the config. Jobs learn from it which results the user forces.

output/specs/RULE/NAME-DIGEST.json is the spec of a job, which its program reads.

Planning knows the names of all; they are written when the jobs start, so that a dry run writes
nothing.

Standard library only: the workflow imports this module while it plans.
"""

import hashlib
import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.workflow.digests import canonical_json, digest, write_atomically

SNAPSHOTS = Path("output/code")
# What jobs run, and plan with on a cluster, below the folder of the Snakefile.
FOLDERS = ("envs", "rewards", "rules", "scripts")
PINS = "requirements*.txt"
# Snapshots that no build has used for so long are deleted. Jobs may still be in a cluster's queue.
MAX_AGE_SECONDS = 7 * 24 * 3600


class Snapshot(NamedTuple):
    """The sources at one moment.

    Attributes:
        folder: Where they are copied to; its name is the digest of their content.
        files: The content of each file by its path.
    """

    folder: Path
    files: dict[str, bytes]

    def write(self) -> None:
        """Copy the sources, unless the copy exists. One that was edited or damaged is replaced.

        Raises:
            OSError: The copy cannot be written.
        """
        folder = self.folder
        if folder.is_dir() and source_files(folder) == self.files:
            return
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
        try:
            for name, content in self.files.items():
                path = temporary / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                os.rename(temporary, folder)
            except OSError:
                # Another process has taken the same snapshot.
                if not folder.is_dir():
                    raise
        finally:
            # Also if the disk is full.
            shutil.rmtree(temporary, ignore_errors=True)


def take_snapshot(root: Path) -> Snapshot:
    """Read the sources.

    Raises:
        OSError: A source cannot be read.
    """
    files = source_files(root)
    sha = hashlib.sha256()
    for name, content in files.items():
        sha.update(f"{name}\0{len(content)}\0".encode() + content)
    return Snapshot(SNAPSHOTS / sha.hexdigest()[:16], files)


class Build(NamedTuple):
    """What the jobs of a build plan with.

    Attributes:
        sources: The folder of the snapshot.
        config: The config as Snakemake read it.
        command_line: What --config set.
        forced: The results that jobs compute although they exist.
    """

    sources: str
    config: dict[str, Any]
    command_line: dict[str, Any]
    forced: list[str]

    @property
    def path(self) -> Path:
        """The absolute path of the file, which does not depend on what is forced.

        It is known before the jobs are: plugins read it when they start.
        """
        key = canonical_json(self._replace(forced=[])._asdict())
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        return (SNAPSHOTS / f"{name}.json").absolute()

    def write(self) -> None:
        """Write the file, unless it exists.

        Raises:
            OSError: The file cannot be written.
        """
        text = canonical_json(self._asdict())
        if self.path.exists() and self.path.read_text() == text:
            os.utime(self.path)
        else:
            write_atomically(self.path, text, durable=False)


def read_build(path: str | Path) -> Build:
    """Return the build in a file."""
    return Build(**json.loads(Path(path).read_text()))


def source_files(root: Path) -> dict[str, bytes]:
    """Return the content of the sources by their paths below root, in the order of the paths.

    Hidden files, which editors write, and bytecode are not sources.
    """
    paths = list(root.glob(PINS))
    for name in FOLDERS:
        for parent, folders, files in os.walk(root / name):
            folders[:] = [inner for inner in folders if not inner.startswith((".", "__pycache__"))]
            paths += [Path(parent, file) for file in files if not file.startswith(".")]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(paths)}


def delete_old_snapshots(current: Path) -> None:
    """Mark a snapshot as used, and delete what no build has used for a week."""
    os.utime(current)
    oldest = time.time() - MAX_AGE_SECONDS
    for path in SNAPSHOTS.iterdir():
        # Planning in another process may rename or delete a file at this moment.
        with suppress(FileNotFoundError):
            if path.stat().st_mtime >= oldest:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


# --- specs ----------------------------------------------------------------------------------------

FOLDER = Path("output/specs")
# What planning remembers; it can be deleted at any time. Planning writes nowhere else.
MEMORY = Path(".snakemake/snakechat")
# Digests of the files of results that were checked when they were read.
CHECKED_DIGESTS = MEMORY / "results.json"


def spec_path(rule: str, name: str, spec_digest: str) -> Path:
    """Return the path of a job's spec file."""
    return FOLDER / rule / f"{name}-{spec_digest[:16]}.json"


def write_spec(spec: dict[str, Any]) -> str:
    """Write the spec file of a job, unless it exists, and return its path.

    Jobs compare a spec file with its name; a damaged one is replaced here.

    Raises:
        OSError: It cannot be written.
    """
    path = spec_path(spec["rule"], spec["name"], digest(spec))
    text = json.dumps(spec, indent=1, sort_keys=True) + "\n"
    if not path.exists() or path.read_text(errors="replace") != text:
        write_atomically(path, text, durable=False)
    return str(path)
