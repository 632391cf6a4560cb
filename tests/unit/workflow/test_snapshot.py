"""Snapshots of the sources."""

import json
import os
from pathlib import Path

import pytest

from snakechat.workflow.code_digests import MAX_AGE_SECONDS, Snapshot, build_path

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
    """Return the texts of the sources in a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json")
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def copy_of(root, forced=()):
    """Write a snapshot of the sources; return its folder and the file of the build in it."""
    snapshot = Snapshot(root)
    build = {"sources": str(snapshot.folder), "config": {"seed": 1}}
    snapshot.write(build, forced)
    assert json.loads(build_path(build).read_text()) == {**build, "forced": [*forced]}
    return snapshot.folder, build_path(build)


def test_a_snapshot_keeps_the_sources_as_they_were(root):
    (root / "scripts/__pycache__").mkdir()
    (root / "scripts/__pycache__/train.pyc").touch()
    (root / "README.md").touch()
    # As Emacs locks a file.
    (root / "scripts/.#train.py").symlink_to("nothing")
    before, snapshot = contents(root), Snapshot(root)
    assert not list(Path().iterdir())
    (root / "scripts/train.py").write_text("# edited\n")
    snapshot.write({"sources": str(snapshot.folder)}, ())
    assert contents(snapshot.folder) == {name: before[name] for name in NAMES}
    assert copy_of(root)[0] != snapshot.folder
    (root / "scripts/train.py").write_text(before["scripts/train.py"])
    # A damaged one is replaced.
    (snapshot.folder / "scripts/train.py").write_text("# edited\n")
    assert copy_of(root)[0] == snapshot.folder
    assert contents(snapshot.folder) == {name: before[name] for name in NAMES}


def test_what_no_build_used_for_a_week_is_deleted(root):
    old, _ = copy_of(root)
    (root / "scripts/train.py").write_text("# edited\n")
    current, _ = copy_of(root)
    for path in (old, current):
        os.utime(path, (1, os.stat(path).st_mtime - MAX_AGE_SECONDS - 1))
    copy_of(root)
    assert list(Path("output/code").iterdir()) == [current]


def test_the_file_of_a_build_is_named_after_its_snapshot_and_config(root):
    folder, path = copy_of(root)
    assert copy_of(root, ["output/sft/a"]) == copy_of(root) == (folder, path)
    assert build_path({"sources": str(folder), "config": {"seed": 2}}) != path
