"""Snapshots of the sources."""

import json
import os
from pathlib import Path

import pytest

from snakechat.workflow.code_digests import (
    MAX_AGE_SECONDS,
    Snapshot,
    build_path,
    write_build,
)

NAMES = ("scripts/train.py", "scripts/package/room.py", "rewards/mine.py", "requirements.txt")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Sources, and the folder of a build."""
    for name in NAMES:
        path = tmp_path / "sources" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    (tmp_path / "build").mkdir()
    monkeypatch.chdir(tmp_path / "build")
    return tmp_path / "sources"


def contents(folder):
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def copy_of(root):
    """Write a snapshot of the sources; return its folder."""
    snapshot = Snapshot(root)
    snapshot.write()
    return snapshot.folder


def test_a_snapshot_keeps_the_sources_as_they_were(root):
    (root / "scripts/__pycache__").mkdir()
    (root / "scripts/__pycache__/train.pyc").touch()
    (root / "README.md").touch()
    # As Emacs locks a file.
    (root / "scripts/.#train.py").symlink_to("nothing")
    before, snapshot = contents(root), Snapshot(root)
    assert not list(Path().iterdir())
    (root / "scripts/train.py").write_text("# edited\n")
    snapshot.write()
    assert contents(snapshot.folder) == {name: before[name] for name in NAMES}
    assert copy_of(root) != snapshot.folder
    (root / "scripts/train.py").write_text(before["scripts/train.py"])
    # A damaged one is replaced.
    (snapshot.folder / "scripts/train.py").write_text("# edited\n")
    assert copy_of(root) == snapshot.folder
    assert contents(snapshot.folder) == {name: before[name] for name in NAMES}


def test_what_no_build_used_for_a_week_is_deleted(root):
    old = copy_of(root)
    (root / "scripts/train.py").write_text("# edited\n")
    current = copy_of(root)
    builds = [{"sources": str(each)} for each in (old, current)]
    for build in builds:
        write_build(build, ())
    for path in (old, current, *map(build_path, builds)):
        os.utime(path, (1, os.stat(path).st_mtime - MAX_AGE_SECONDS - 1))
    write_build(builds[1], ())
    copy_of(root)
    kept = {current.absolute(), build_path(builds[1])}
    assert set(Path("output/code").absolute().iterdir()) == kept


def test_a_build_is_named_after_its_snapshot_and_config(root):
    build, other = ({"sources": str(root), "config": {"seed": seed}} for seed in (1, 2))
    path = build_path(build)
    assert build_path(other) != path
    for forced in ([], ["output/sft/a"], []):
        write_build(build, forced)
        assert json.loads(path.read_text()) == {**build, "forced": forced}
