"""The lineage of a result, from the manifests of its inputs."""

import pytest

from snakechat.workflow.digests import digest
from snakechat.workflow.manifest import (
    content_digest,
    merge_lineages,
    named_lineage,
    recorded_inputs,
    result_id,
    upstream_first,
)


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


def test_an_input_that_was_rebuilt_is_listed_as_it_is(chain):
    """The other input was made from the version before, which had the same content."""
    data, split = chain[0], chain[1]
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
