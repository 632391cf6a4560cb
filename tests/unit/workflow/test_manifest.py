"""Manifests: reading, and damaged ones, which planning and the tools take for missing ones."""

import copy
import json

import pytest

from snakechat.workflow.digests import digest, file_digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import manifest_path, read_input, read_manifest, result_files

DIGEST = digest("anything")
UPSTREAM = {"rule": "split_dataset", "name": "toy", "path": "output/split/toy"}
SPEC = {"rule": "train_sft", "name": "tiny", "path": "output/sft/tiny", "settings": {"seed": 1}}
SPEC |= {"inputs": {"data": UPSTREAM}, "files": {"a": DIGEST}, "code": {"a.py": DIGEST}}
MANIFEST = {"spec": {**SPEC, "requirements": {"torch": "2"}}, "inputs": {"data": DIGEST}}
MANIFEST |= {"facts": {"rows": 3}, "files": {"weights": {"size": 3, "sha256": DIGEST}}}
JOB = {"rule": "split_dataset", "name": "toy", "settings": {"seed": 1}, "facts": {"rows": 3}}
JOB |= {"spec": DIGEST, "content": DIGEST, "inputs": []}
MANIFEST["lineage"] = {"output/split/toy": JOB}
ACCEPTED = {"because": "same", "date": "2026-01-01", "changes": ["code"], "from": "a", "to": "b"}


def places(value, path=()):
    """Yield the path of each value that readers rely on."""
    for key in value if isinstance(value, dict) else ():
        if key not in ("seed", "rows", "torch"):
            yield (*path, key)
            yield from places(value[key], (*path, key))


def damaged(path, damage):
    """Return the text of the manifest with a damage at a path."""
    manifest = copy.deepcopy(MANIFEST)
    parent = manifest
    for key in path[:-1]:
        parent = parent[key]
    damage(parent, path[-1])
    return json.dumps(manifest)


def test_a_manifest_is_read(tmp_path):
    (tmp_path / "manifest").write_text(json.dumps(MANIFEST))
    assert read_manifest(tmp_path / "manifest") == MANIFEST


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[" * 5000, b'{"a":' * 5000, b"\xff\xfe\0", b"null", b"1" * 5000),
        json.dumps(MANIFEST).encode()[:-20],
        json.dumps({**MANIFEST, "facts": {"rows": float("inf")}}).encode(),
    ],
    ids=range(8),
)
def test_a_file_that_is_no_manifest_is_none(tmp_path, content):
    assert read_manifest(tmp_path / "manifest") is None
    (tmp_path / "manifest").write_bytes(content)
    assert read_manifest(tmp_path / "manifest") is None


@pytest.mark.parametrize("value", [[5], 7, {}, [{}], [{**ACCEPTED, "changes": [1]}]])
@pytest.mark.parametrize("place", ["manifest", "lineage"])
def test_a_damaged_acceptance_is_none(value, place, tmp_path):
    for accepted in ([ACCEPTED], value):
        manifest = copy.deepcopy(MANIFEST)
        owner = manifest if place == "manifest" else manifest["lineage"]["output/split/toy"]
        owner["accepted"] = accepted
        (tmp_path / "manifest").write_text(json.dumps(manifest))
        expected = manifest if accepted == [ACCEPTED] else None
        assert read_manifest(tmp_path / "manifest") == expected


def test_a_missing_key_or_a_value_of_another_type_is_none(tmp_path):
    file = tmp_path / "manifest"
    wrong = [None, 7, [3], "text", {"other": 1}]
    for path in places(MANIFEST):
        for value in wrong:
            file.write_text(
                damaged(path, lambda parent, key, value=value: parent.update({key: value}))
            )
            manifest = read_manifest(file)
            # Some have the form of the original.
            found = manifest
            for key in path if manifest else ():
                found = found[key]
            assert manifest is None or type(found) is type(value)
        # The names of entries are free.
        if path[-1] not in ("data", "a", "a.py", "weights", "output/split/toy"):
            file.write_text(damaged(path, lambda parent, key: parent.pop(key)))
            assert read_manifest(file) is None, path


def test_an_input_without_a_readable_manifest_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"toy.manifest.json cannot be read: delete it"):
        read_input(UPSTREAM)
    manifest_path("toy").write_text(json.dumps(MANIFEST))
    assert read_input({"path": "toy"}) == MANIFEST


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
