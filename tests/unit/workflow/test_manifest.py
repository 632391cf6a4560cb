"""Manifests and records of runs: damaged ones are missing, for planning and for the tools."""

import pytest

from snakechat.workflow.digests import file_digest, sealed_json
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import (
    manifest_path,
    read_manifest,
    read_run_record,
    require_manifest,
    result_files,
)

MANIFEST = {"spec": {}, "inputs": {}, "lineage": {}, "files": {}}
MANIFEST["facts"] = {"rows": 3, "share": 0.1}


@pytest.mark.parametrize("content", [b"", b"[" * 5000, b"\xff\xfe\0", b"null", b"{}"], ids=range(5))
def test_a_file_that_is_no_manifest_is_none(tmp_path, content):
    path = tmp_path / "manifest.json"
    assert read_manifest(path) is None and read_run_record(tmp_path) is None
    for name in ("manifest.json", "run.json"):
        (tmp_path / name).write_bytes(content)
    assert read_manifest(path) is None and read_run_record(tmp_path) is None


def test_any_change_of_a_value_is_noticed(tmp_path):
    path = tmp_path / "manifest.json"
    text = sealed_json(MANIFEST)
    path.write_text(text)
    assert read_manifest(path) == MANIFEST
    for old, new in (('"rows": 3', '"rows": 4'), ("0.1", "Infinity"), ('"lineage": {},', "")):
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        assert read_manifest(path) is None


def test_the_record_of_another_spec_counts_only_if_its_result_was_accepted(tmp_path):
    record = {"spec": "before"}
    (tmp_path / "run.json").write_text(sealed_json(record))
    assert read_run_record(tmp_path) == record
    assert read_run_record(tmp_path, {"spec": "before"}) == record
    assert read_run_record(tmp_path, {"spec": "after"}) is None
    accepted = [{"from": "before", "to": "between"}, {"from": "between", "to": "after"}]
    assert read_run_record(tmp_path, {"spec": "after", "accepted": accepted}) == record


def test_an_input_without_a_readable_manifest_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"toy.manifest.json cannot be read: delete it"):
        require_manifest("toy.manifest.json")
    manifest_path("toy").write_text(sealed_json(MANIFEST))
    assert require_manifest("toy.manifest.json") == MANIFEST


def test_files_of_a_result_have_their_size_and_digest(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "weights").write_bytes(b"123")
    (tmp_path / "deep/config").write_bytes(b"{}")
    (tmp_path / ".snakemake_timestamp").touch()
    # A model card, which people edit.
    (tmp_path / "README.md").write_text("# Tiny")
    assert result_files(tmp_path) == {
        "deep/config": {"size": 2, "sha256": file_digest(tmp_path / "deep/config")},
        "weights": {"size": 3, "sha256": file_digest(tmp_path / "weights")},
    }
