"""Files that change before or while a job reads them."""

import hashlib
import os
import time

import pytest

from snakechat.workflow.digests import planned_files
from snakechat.workflow.errors import InputError

CONTENT = b"as planned"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "source.jsonl"
    path.write_bytes(CONTENT)
    os.utime(path, (10**9, 10**9))
    # Later changes get another time than this one.
    time.sleep(0.02)
    return path


def edit_and_restore(path):
    """Edit a file in place and undo it, with its old modification time."""
    path.write_bytes(b"!")
    path.write_bytes(CONTENT)
    os.utime(path, (10**9, 10**9))


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(b"other"), os.unlink])
def test_a_change_since_planning_is_noticed_before_reading(file, change):
    with planned_files({file: DIGEST}):
        assert file.read_bytes() == CONTENT
    change(file)
    with (
        pytest.raises(InputError, match=r"source.jsonl changed since this build was planned"),
        planned_files({file: DIGEST}),
    ):
        raise AssertionError("read")


@pytest.mark.parametrize("change", [edit_and_restore, os.unlink])
def test_a_change_while_reading_is_noticed_after_it(file, change):
    with (
        pytest.raises(InputError, match=r"source.jsonl changed while it was read: [a-z ]+$"),
        planned_files({file: DIGEST}),
    ):
        change(file)
