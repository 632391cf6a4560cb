"""Snapshots of the sources."""

import json
import os
from pathlib import Path

import pytest

from snakechat.workflow.snapshot import (
    MAX_AGE_SECONDS,
    delete_old_snapshots,
    take_snapshot,
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
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_snapshot_keeps_the_sources_as_they_were(root):
    (root / "scripts/__pycache__").mkdir()
    (root / "scripts/__pycache__/train.pyc").touch()
    (root / "README.md").touch()
    # As Emacs locks a file.
    (root / "scripts/.#train.py").symlink_to("nothing")
    before = contents(root)
    snapshot = take_snapshot(root)
    assert take_snapshot(root) == snapshot
    (root / "scripts/train.py").write_text("# edited\n")
    assert take_snapshot(root) != snapshot
    assert contents(snapshot) == {name: before[name] for name in NAMES}


def test_a_moved_line_between_two_files_is_another_snapshot(root):
    """The digest covers where each file ends."""
    (root / "scripts/a.py").write_text("x")
    (root / "scripts/b.py").write_text("yz")
    snapshot = take_snapshot(root)
    (root / "scripts/a.py").write_text("xy")
    (root / "scripts/b.py").write_text("z")
    assert take_snapshot(root) != snapshot


def test_an_interrupted_copy_is_not_used(root):
    snapshot = take_snapshot(root)
    interrupted = snapshot.with_name(f".{snapshot.name}.1")
    snapshot.rename(interrupted)
    (interrupted / "scripts/train.py").unlink()
    assert contents(take_snapshot(root)) == contents(root)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("# edited\n")])
def test_a_damaged_snapshot_is_replaced(root, damage):
    snapshot = take_snapshot(root)
    damage(snapshot / "scripts/train.py")
    assert take_snapshot(root) == snapshot
    assert contents(snapshot) == contents(root)


def test_snapshots_that_no_build_used_for_a_week_are_deleted(root):
    old = take_snapshot(root)
    (root / "scripts/train.py").write_text("# edited\n")
    current = take_snapshot(root)
    old_build, used_build = (write_build(each, {"seed": 1}, {}) for each in (old, current))
    for path in (old, current, old_build, used_build):
        os.utime(path, (1, os.stat(path).st_mtime - MAX_AGE_SECONDS - 1))
    assert write_build(current, {"seed": 1}, {}) == used_build
    delete_old_snapshots(current)
    assert set(Path("output/code").iterdir()) == {current, used_build}


def test_a_build_is_named_after_its_snapshot_and_config(root):
    snapshot = take_snapshot(root)
    build = write_build(snapshot, {"seed": 1}, {})
    assert json.loads(build.read_text())["sources"] == str(snapshot.absolute())
    assert write_build(snapshot, {"seed": 2}, {}) != build
    build.write_text("damaged")
    assert write_build(snapshot, {"seed": 1}, {}) == build
    assert json.loads(build.read_text())["config"] == {"seed": 1}
