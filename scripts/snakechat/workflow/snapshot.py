"""Snapshots of the sources: a build runs the code that it was planned with.

output/code/DIGEST/ is a copy of the files that jobs run, named after their content. An edit of the
sources while a build runs changes none of its jobs, and bytecode always belongs to its source.

On a cluster, Snakemake plans again in each job. output/code/DIGEST.json says with what: the
snapshot and the config.

Standard library only: the workflow imports this module while it plans.
"""

import hashlib
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from snakechat.workflow.digests import canonical_json, write_atomically

SNAPSHOTS = Path("output/code")
# What jobs run, and plan with on a cluster, below the folder of the Snakefile.
FOLDERS = ("envs", "rewards", "rules", "scripts")
PINS = "requirements*.txt"
# Snapshots that no build has used for so long are deleted. Jobs may still be in a cluster's queue.
MAX_AGE_SECONDS = 7 * 24 * 3600


def take_snapshot(root: Path) -> Path:
    """Copy the sources, unless a snapshot of them exists; return the folder of the snapshot.

    A snapshot that was edited or damaged is replaced.

    Raises:
        OSError: A source cannot be read, or the snapshot cannot be written.
    """
    files = source_files(root)
    sha = hashlib.sha256()
    for name, content in files.items():
        sha.update(f"{name}\0{len(content)}\0".encode() + content)
    snapshot = SNAPSHOTS / sha.hexdigest()[:16]
    if snapshot.is_dir() and source_files(snapshot) == files:
        return snapshot
    temporary = snapshot.with_name(f".{snapshot.name}.{os.getpid()}")
    for name, content in files.items():
        path = temporary / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    shutil.rmtree(snapshot, ignore_errors=True)
    try:
        os.rename(temporary, snapshot)
    except OSError:
        # Another process has taken the same snapshot.
        shutil.rmtree(temporary)
        if not snapshot.is_dir():
            raise
    return snapshot


def write_build(snapshot: Path, config: dict[str, Any], command_line: dict[str, Any]) -> Path:
    """Write what the jobs of a build plan with; return the path of the file.

    Args:
        config: The config as Snakemake read it.
        command_line: What --config set.

    Raises:
        OSError: The file cannot be written.
    """
    build = {"sources": str(snapshot.absolute()), "config": config, "command_line": command_line}
    text = canonical_json(build)
    path = SNAPSHOTS / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if path.exists() and path.read_text() == text:
        os.utime(path)
    else:
        write_atomically(path, text, durable=False)
    return path


def source_files(root: Path) -> dict[str, bytes]:
    """Return the content of the sources by their paths below root, in the order of the paths.

    Hidden files, which editors write, and bytecode are no sources.
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
