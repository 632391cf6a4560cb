"""Snapshots of the sources."""

import errno
import os
from pathlib import Path

import pytest

from snakechat.workflow.snapshot import (
    MAX_AGE_SECONDS,
    Build,
    delete_old_snapshots,
    read_build,
    take_snapshot,
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
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def copy_of(root):
    """Write a snapshot of the sources; return its folder."""
    snapshot = take_snapshot(root)
    snapshot.write()
    return snapshot.folder


def build_of(snapshot, seed=1, forced=()):
    return Build(str(snapshot), {"seed": seed}, {}, list(forced))


def test_a_snapshot_keeps_the_sources_as_they_were(root):
    (root / "scripts/__pycache__").mkdir()
    (root / "scripts/__pycache__/train.pyc").touch()
    (root / "README.md").touch()
    # As Emacs locks a file.
    (root / "scripts/.#train.py").symlink_to("nothing")
    before, snapshot = contents(root), take_snapshot(root)
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


def test_a_full_disk_leaves_no_part_of_a_copy(root, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    snapshot = take_snapshot(root)
    monkeypatch.setattr(Path, "write_bytes", fail)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            snapshot.write()
    assert list(snapshot.folder.parent.iterdir()) == []


def test_snapshots_that_no_build_used_for_a_week_are_deleted(root):
    old = copy_of(root)
    (root / "scripts/train.py").write_text("# edited\n")
    current = copy_of(root)
    old_build, used_build = (build_of(each).path for each in (old, current))
    build_of(old).write()
    build_of(current).write()
    for path in (old, current, old_build, used_build):
        os.utime(path, (1, os.stat(path).st_mtime - MAX_AGE_SECONDS - 1))
    build_of(current).write()
    delete_old_snapshots(current)
    assert set(Path("output/code").absolute().iterdir()) == {current.absolute(), used_build}


def test_a_build_is_named_after_its_snapshot_and_config(root):
    snapshot = copy_of(root)
    build = build_of(snapshot)
    forced = build_of(snapshot, forced=["output/sft/a"])
    assert build_of(snapshot, seed=2).path != build.path == forced.path
    for each in (build, forced, build):
        each.write()
        assert read_build(build.path) == each
    build.path.write_text("damaged")
    build.write()
    assert read_build(build.path) == build
