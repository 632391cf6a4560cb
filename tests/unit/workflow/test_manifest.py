"""Manifests: reading, and checks of results against them."""

import json

import pytest

from snakechat.workflow.digests import file_digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import (
    check_files,
    manifest_path,
    parse_manifest,
    read_input,
    read_manifest,
    result_files,
)

SPEC = {"path": "output/sft/tiny", "inputs": {}}


@pytest.fixture
def result(tmp_path, monkeypatch):
    """A result with its manifest inside and next to it."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "output/sft/tiny"
    (folder / "deep").mkdir(parents=True)
    (folder / "weights").write_bytes(b"123")
    (folder / "deep/config").write_bytes(b"{}")
    (folder / ".snakemake_timestamp").touch()
    # A model card, which people edit.
    (folder / "README.md").write_text("# Tiny")
    write_manifest(folder)
    return folder


def write_manifest(folder, **changes):
    manifest = {"spec": SPEC, "inputs": {"data": "0"}, "lineage": {}, "facts": {}}
    text = json.dumps({**manifest, "files": result_files(folder), **changes})
    (folder / "manifest.json").write_text(text)
    manifest_path(folder).write_text(text)


def test_files_of_a_result_have_their_size_and_digest(result):
    assert result_files(result) == {
        "deep/config": {"size": 2, "sha256": file_digest(result / "deep/config")},
        "weights": {"size": 3, "sha256": file_digest(result / "weights")},
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "7",
        "{}",
        json.dumps({"spec": SPEC, "inputs": {}, "lineage": {}, "facts": {}}),
        json.dumps({"spec": SPEC, "inputs": [], "lineage": {}, "facts": {}, "files": {}}),
        json.dumps({"spec": {}, "inputs": {}, "lineage": {}, "facts": {}, "files": {}}),
    ],
)
def test_other_texts_are_not_manifests(text):
    assert parse_manifest(text) is None


def test_a_missing_or_binary_manifest_is_none(tmp_path):
    assert read_manifest(tmp_path / "gone") is None
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert read_manifest(tmp_path / "binary") is None


def test_an_input_that_matches_its_manifest_is_accepted(result):
    check_files(result, read_input(SPEC))


def test_an_input_without_a_readable_manifest_is_an_error(result):
    manifest_path(result).write_text("{")
    with pytest.raises(InputError, match=r"tiny.manifest.json cannot be read: delete it"):
        read_input(SPEC)


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (lambda folder: (folder / "weights").write_bytes(b"124"), "weights"),
        (lambda folder: (folder / "weights").unlink(), "weights"),
        (lambda folder: (folder / "added").touch(), "added"),
    ],
)
def test_a_damaged_input_is_an_error(result, damage, name):
    damage(result)
    with pytest.raises(InputError, match=f"output/sft/tiny/{name} does not match its manifest"):
        check_files(SPEC["path"], read_input(SPEC))
