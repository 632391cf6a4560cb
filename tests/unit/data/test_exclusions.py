"""Digests of rows, and which rows a dataset excludes."""

from types import SimpleNamespace

import pytest

from snakechat.data.exclusions import read_digest_list, removed_rows
from snakechat.data.records import RecordWriter, read_digests, record_digest
from snakechat.workflow.digests import file_digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.run_options import RunOptions
from support.dialogues import make_record

ROWS = [("Ann?", " Yes.", " No."), ("Bob?", " Yes.", None), ("Cid?", " Ann.", ""), ("Bob?", "", "")]
DIGESTS = list(map(record_digest, ROWS))


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "train.parquet"
    with RecordWriter(path) as writer:
        for row in ROWS:
            writer.write(make_record(*row))
    return path


def job(exclude, files=()):
    """A job with `exclude` in its spec, and its options."""
    return SimpleNamespace(
        spec={"files": {path.name: file_digest(path) for path in files}},
        options=RunOptions(excluded_files={path.name: str(path) for path in files}),
        facts={},
        settings={"exclude": [row.hex() for row in exclude]},
    )


def excluded(job, path):
    """Return the numbers of the excluded rows."""
    return removed_rows(job, job.settings, {"train": path}, "mine")["train"].tolist()


def test_records_contain_digests_that_distinguish_missing_texts_and_boundaries(records):
    assert read_digests(records) == DIGESTS
    texts = [("ab", "c", None), ("a", "bc", None), ("ab", "c", ""), ("ab", None, "c")]
    assert len(set(map(record_digest, texts))) == len(texts)


def test_rows_are_excluded_by_digest_and_file(records, tmp_path):
    file = tmp_path / "requests.txt"
    # One of another dataset, a comment and a blank line.
    file.write_text(f"{DIGESTS[3].hex()}  # a request\n\n# next\n{'0' * 32}\n")
    found = job([DIGESTS[1]])
    assert excluded(found, records) == [1]
    assert found.facts["excluded"] == [DIGESTS[1].hex()]
    planned = job([DIGESTS[1]], [file])
    assert excluded(planned, records) == [1, 3]
    assert excluded(SimpleNamespace(settings={}), records) == []
    file.write_text("# edited\n")
    with pytest.raises(InputError, match="changed since"):
        excluded(planned, records)


def test_a_digest_of_no_row_is_an_error(records):
    with pytest.raises(InputError, match=r"datasets\.mine\.exclude: 0{32} is the digest of no row"):
        excluded(job([bytes(16)]), records)


@pytest.mark.parametrize("text", [b"0" * 33, b"\xff\xfe\x00"])
def test_a_file_that_is_no_list_of_digests_is_an_error(tmp_path, text):
    path = tmp_path / "requests.txt"
    path.write_bytes(b"0" * 32 + b"\n" + text)
    with pytest.raises(InputError, match=r"requests\.txt: (line 2: )?expected"):
        read_digest_list(path)
