"""Digests of rows, and which rows a dataset excludes."""

from types import SimpleNamespace

import pytest

from snakechat.data.phase_splits import removed_rows
from snakechat.data.records import open_records, read_digests, record_digest
from snakechat.workflow.errors import InputError
from support.dialogues import make_record

ROWS = [("Ann?", " Yes.", " No."), ("Bob?", " Yes.", None), ("Cid?", " Ann.", ""), ("Bob?", "", "")]
DIGESTS = list(map(record_digest, ROWS))


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "train.parquet"
    with open_records(path) as write:
        for row in ROWS:
            write(make_record(*row))
    return path


def job(exclude):
    """A job with `exclude` in its settings."""
    return SimpleNamespace(facts={}, settings={"exclude": [row.hex() for row in exclude]})


def excluded(job, path):
    """Return the numbers of the excluded rows."""
    return removed_rows(job, job.settings, {"train": path}, "mine")["train"].tolist()


def test_records_contain_digests_that_distinguish_missing_texts_and_boundaries(records):
    assert read_digests(records) == DIGESTS
    texts = [("ab", "c", None), ("a", "bc", None), ("ab", "c", ""), ("ab", None, "c")]
    assert len(set(map(record_digest, texts))) == len(texts)


def test_rows_are_excluded_by_digest(records):
    found = job([DIGESTS[3], DIGESTS[1]])
    assert excluded(found, records) == [1, 3]
    assert found.facts["excluded"] == sorted(DIGESTS[row].hex() for row in (1, 3))
    assert excluded(SimpleNamespace(settings={}), records) == []


def test_a_digest_of_no_row_is_an_error(records):
    with pytest.raises(InputError, match=r"datasets\.mine\.exclude: 0{32} is the digest of no row"):
        excluded(job([bytes(16)]), records)
