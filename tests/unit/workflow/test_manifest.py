"""Manifests, records of runs and lineages. Damaged ones are missing."""

import pytest

from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import (
    content_digest,
    digest,
    file_digest,
    manifest_path,
    merge_lineages,
    named_lineage,
    read_manifest,
    read_run_record,
    recorded_inputs,
    require_manifest,
    result_files,
    result_id,
    sealed_json,
    upstream_first,
)

MANIFEST = {"spec": {}, "inputs": {}, "lineage": {}, "files": {}}
MANIFEST["facts"] = {"rows": 3, "share": 0.1}


@pytest.mark.parametrize("content", [b"", b"[" * 5000, b"\xff\xfe\0", b"null", b"{}"], ids=range(5))
def test_a_file_that_is_no_manifest_is_none(tmp_path, content):
    for name in ("manifest.json", "run.json"):
        (tmp_path / name).write_bytes(content)
    assert read_manifest(tmp_path / "manifest.json") is read_run_record(tmp_path) is None


def test_any_change_of_a_value_is_noticed(tmp_path):
    path = tmp_path / "manifest.json"
    text = sealed_json(MANIFEST)
    path.write_text(text)
    assert read_manifest(path) == MANIFEST
    for old, new in (('"rows": 3', '"rows": 4'), ("0.1", "Infinity"), ('"lineage": {},', "")):
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        assert read_manifest(path) is None
    # Of another form.
    path.write_text(sealed_json({"spec": {}}))
    assert read_manifest(path) is None


def test_the_record_of_another_spec_counts_only_if_its_result_was_accepted(tmp_path):
    record = {"spec": "before"}
    (tmp_path / "run.json").write_text(sealed_json(record))
    assert read_run_record(tmp_path) == record
    assert read_run_record(tmp_path, {"spec": "before"}) == record
    assert read_run_record(tmp_path, {"spec": "after"}) is None
    accepted = [{"from": "before", "to": "between"}, {"from": "between", "to": "after"}]
    assert read_run_record(tmp_path, {"spec": "after", "accepted": accepted}) == record


def test_an_input_without_a_readable_manifest_is_an_error(tmp_path):
    path = manifest_path(tmp_path / "toy")
    with pytest.raises(InputError, match=r"toy.manifest.json cannot be read: delete it"):
        require_manifest(path)
    path.write_text(sealed_json(MANIFEST))
    assert require_manifest(path) == MANIFEST


def test_files_of_a_result_have_their_size_and_digest(tmp_path):
    (tmp_path / "deep").mkdir()
    # A model card, which people edit.
    for name in ("weights", "deep/config", ".snakemake_timestamp", "README.md"):
        (tmp_path / name).write_text("12")
    properties = {"size": 2, "sha256": file_digest(tmp_path / "weights")}
    assert result_files(tmp_path) == {"deep/config": properties, "weights": properties}


# --- lineage ------------------------------------------------------------------------------------


def manifest(name, inputs=(), settings=None, **facts):
    """Return the manifest of a job of the rule make_NAME whose inputs have these manifests."""
    rules = {each["spec"]["rule"][5:]: each for each in inputs}
    spec = {"rule": f"make_{name}", "settings": settings or {}, "files": {}, "code": {}}
    spec |= {"inputs": {key: {"rule": f"make_{key}"} for key in rules}, "requirements": {}}
    files = {"rows": {"size": 1, "sha256": name}}
    recorded = recorded_inputs(spec, rules)
    lineage = merge_lineages(inputs)
    return {"spec": spec, "inputs": recorded, "lineage": lineage, "facts": facts, "files": files}


@pytest.fixture
def chain():
    """Manifests of data -> split -> tokens and data -> model -> tokens."""
    data = manifest("data", (), {"hub": "mine/data", "revision": "main"}, commit="abc123")
    split = manifest("split", [data])
    model = manifest("model", [data])
    tokens = manifest("tokens", [data, split, model])
    return [data, split, model, tokens]


def test_a_lineage_has_every_upstream_job_once(chain):
    data, split, model, tokens = chain
    assert set(tokens["lineage"]) == {result_id(each) for each in (data, split, model)}
    assert tokens["lineage"][result_id(data)] == {
        "rule": "make_data",
        "settings": {"hub": "mine/data", "revision": "main"},
        "facts": {"commit": "abc123"},
        "files": {"number": 0, "digest": digest({})},
        "spec": digest(data["spec"]),
        "content": content_digest(data),
        "inputs": {},
    }
    assert tokens["lineage"][result_id(split)]["inputs"] == {"data": result_id(data)}
    # The split was made from the version before, which had the same content.
    rebuilt = manifest("data", (), {"hub": "mine/data", "revision": "v2"}, commit="def456")
    jobs = merge_lineages([rebuilt, split])
    assert jobs[result_id(rebuilt)]["facts"] == {"commit": "def456"}
    assert jobs[result_id(data)]["facts"] == {"commit": "abc123"}


NAMES = {
    "output/tokens": {"data": "output/d", "split": "output/s", "model": "output/m"},
    "output/s": {"data": "output/d"},
    "output/m": {"data": "output/d"},
}


def test_a_lineage_by_names_has_each_job_after_its_inputs(chain):
    tokens = chain[-1]
    results = {"output/tokens": result_id(tokens)}
    jobs = named_lineage(results, merge_lineages([tokens]), NAMES)
    paths = ["output/d", "output/m", "output/s", "output/tokens"]
    assert upstream_first(jobs) == paths
    assert [jobs[path]["name"] for path in paths] == ["d", "m", "s", "tokens"]
    assert jobs["output/s"]["inputs"] == ["output/d"]
    # Without names of today, a job has its own.
    unnamed = named_lineage(results, merge_lineages([tokens]), {})
    assert set(unnamed) == {"output/tokens", *map(result_id, chain[:-1])}
