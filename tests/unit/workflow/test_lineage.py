"""The lineage of a result, from the manifests of its inputs."""

import pytest

from snakechat.workflow.digests import digest
from snakechat.workflow.lineage import merge_lineages, upstream_first
from snakechat.workflow.manifest import content_digest


def spec(path, *inputs, **settings):
    """Return the spec of a job with these upstream specs."""
    return {
        "rule": f"make_{path}",
        "name": path,
        "path": f"output/{path}",
        "settings": settings,
        "inputs": {one["name"]: {"path": one["path"]} for one in inputs},
        "files": {},
        "code": {},
        "requirements": {},
    }


def manifest(of, *inputs, **facts):
    """Return the manifest of a spec whose inputs have these manifests."""
    files = {"rows": {"size": 1, "sha256": of["name"]}}
    return {"spec": of, "lineage": merge_lineages(inputs), "facts": facts, "files": files}


@pytest.fixture
def chain():
    """Manifests of data -> split -> tokens and data -> model -> tokens."""
    data = manifest(spec("data", hub="mine/data", revision="main"), commit="abc123")
    split = manifest(spec("split", data["spec"]), data)
    model = manifest(spec("model", data["spec"]), data)
    tokens = manifest(
        spec("tokens", data["spec"], split["spec"], model["spec"]), data, split, model
    )
    return [data, split, model, tokens]


def test_a_lineage_has_every_upstream_job_once(chain):
    data, tokens = chain[0], chain[-1]
    assert set(tokens["lineage"]) == {"output/data", "output/split", "output/model"}
    assert tokens["lineage"]["output/data"] == {
        "rule": "make_data",
        "name": "data",
        "settings": {"hub": "mine/data", "revision": "main"},
        "facts": {"commit": "abc123"},
        "files": {"number": 0, "digest": digest({})},
        "spec": digest(data["spec"]),
        "content": content_digest(data),
        "inputs": [],
    }
    assert tokens["lineage"]["output/split"]["inputs"] == ["output/data"]


def test_an_input_that_was_rebuilt_is_listed_as_it_is(chain):
    """The other input was made from the version before, which had the same content."""
    data, split = chain[0], chain[1]
    rebuilt = manifest(spec("data", hub="mine/data", revision="v2"), commit="def456")
    jobs = merge_lineages([rebuilt, split])
    assert jobs["output/data"]["facts"] == {"commit": "def456"}
    assert split["lineage"]["output/data"]["spec"] == digest(data["spec"])


def test_each_job_follows_its_inputs(chain):
    paths = ["output/data", "output/model", "output/split", "output/tokens"]
    assert upstream_first(merge_lineages(chain)) == paths
