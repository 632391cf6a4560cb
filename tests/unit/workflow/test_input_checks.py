"""Checks of the inputs of a job, and what they read."""

import os

import pytest

from snakechat.workflow import digests
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import CHECKED_DIGESTS, check_inputs
from snakechat.workflow.manifest import result_files


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Return a function that checks an input and returns the names of the files that it reads."""
    monkeypatch.chdir(tmp_path)
    # Digests of files that were written just now would not be remembered.
    monkeypatch.setattr(digests, "RECENT", -1.0)
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("weights", "config"):
        (folder / name).write_text(name)
    manifest, read = {"files": result_files(folder)}, []
    file_digest = digests.file_digest

    def counted(path, *arguments):
        read.append(os.path.basename(path))
        return file_digest(path, *arguments)

    monkeypatch.setattr(digests, "file_digest", counted)

    def check_once():
        read.clear()
        check_inputs({"model": folder}, {"model": manifest})
        return sorted(read)

    return check_once


def test_files_that_have_not_changed_are_read_once(check):
    assert check() == ["config", "weights"]
    assert check() == []
    CHECKED_DIGESTS.unlink()
    assert check() == ["config", "weights"]


def test_an_edit_that_restores_size_and_time_is_noticed(check, tmp_path):
    check()
    path = tmp_path / "model/weights"
    status = path.stat()
    path.write_text("Weights")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(InputError, match="model: weights has other content: delete"):
        check()
    # The digest that it had before is not remembered in its place.
    with pytest.raises(InputError, match="model: weights has other content: delete"):
        check()
