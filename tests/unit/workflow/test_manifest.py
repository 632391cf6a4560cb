"""Manifests: reading, and damaged ones, which planning and the tools take for missing ones."""

import copy
import json

import pytest

from snakechat.workflow.digests import digest, file_digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import manifest_path, read_manifest, require_manifest, result_files

DIGEST = digest("anything")
SPEC = {"rule": "train_sft", "settings": {"seed": 1}, "inputs": {"data": {"rule": "split_dataset"}}}
SPEC |= {"files": {"a": DIGEST}, "code": {"a.py": DIGEST}, "requirements": {"torch": "2"}}
MANIFEST = {"spec": SPEC, "inputs": {"data": {"result": "split_dataset/0", "digest": DIGEST}}}
MANIFEST |= {"facts": {"rows": 3}, "files": {"weights": {"size": 3, "sha256": DIGEST}}}
JOB = {"rule": "split_dataset", "settings": {"seed": 1}, "facts": {"rows": 3}}
JOB |= {"spec": DIGEST, "content": DIGEST, "inputs": {}}
MANIFEST["lineage"] = {"split_dataset/0": JOB}
ACCEPTED = {"because": "same", "date": "2026-01-01", "changes": ["code"], "from": "a", "to": "b"}
MANIFEST["accepted"] = [ACCEPTED]


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[" * 5000, b"\xff\xfe\0", b"null"),
        json.dumps({**MANIFEST, "facts": {"rows": float("inf")}}).encode(),
    ],
    ids=range(5),
)
def test_a_file_that_is_no_manifest_is_none(tmp_path, content):
    path = tmp_path / "manifest"
    assert read_manifest(path) is None
    path.write_bytes(content)
    assert read_manifest(path) is None


@pytest.mark.parametrize(
    "path",
    [
        *(("facts",), ("spec", "inputs", "data", "rule"), ("inputs", "data", "digest")),
        *(("lineage", "split_dataset/0", "content"), ("accepted", 0, "changes", 0)),
        *(("files", "weights"), ("files", "weights", "size")),
    ],
)
def test_a_missing_key_or_a_value_of_another_type_is_none(tmp_path, path):
    manifest = copy.deepcopy(MANIFEST)
    (tmp_path / "manifest").write_text(json.dumps(manifest))
    assert read_manifest(tmp_path / "manifest") == MANIFEST
    parent = manifest
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = None
    (tmp_path / "manifest").write_text(json.dumps(manifest))
    assert read_manifest(tmp_path / "manifest") is None


def test_an_input_without_a_readable_manifest_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"toy.manifest.json cannot be read: delete it"):
        require_manifest("toy.manifest.json")
    manifest_path("toy").write_text(json.dumps(MANIFEST))
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
