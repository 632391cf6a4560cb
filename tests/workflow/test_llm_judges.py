"""LLM judges in builds: the API key is checked first, and a rebuild sends no request."""

import json
import shutil

import pytest
import yaml

from support.llm_endpoint import SECRET, judge_entry, serving

TARGET = "output/data/labelled.manifest.json"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with serving() as server:
        # Replies differ from one request to the next: only the cache can repeat them.
        server.replies = [lambda body: "ABC"[len(server.requests) % 3]]
        yield server


@pytest.fixture
def workflow(sources, server):
    """A dataset of 40 pairs that a judge labels."""
    (sources.folder / "mine.yaml").write_text(
        yaml.safe_dump(
            {
                "datasets": {
                    "pairs": {"generate": "shop", "rows": 60, "eval_rows": 20},
                    "labelled": {"label": "pairs", "llm_judge": "wise", "max_rows": 20},
                },
                "llm_judges": {"wise": judge_entry(server)},
            }
        )
    )
    sources.options = ("--configfile", "mine.yaml")
    return sources


def test_a_missing_key_stops_the_build_before_its_first_job(workflow, server):
    process = workflow.snakemake(TARGET, "--cores", "1")
    assert process.returncode
    assert (
        "error: llm_judges.wise.key_env: environment variable JUDGE_KEY has no key: export it"
        in process.stdout
    )
    assert not (workflow.folder / "output/data/pairs.manifest.json").exists()


def test_a_rebuild_sends_no_request_and_makes_the_same_bytes(workflow, server):
    workflow.environment = {"JUDGE_KEY": SECRET}
    workflow.build(TARGET)
    assert len(server.requests) == 80
    output = workflow.folder / "output"
    manifest = json.loads((output / "data/labelled.manifest.json").read_text())
    run = json.loads((output / "data/labelled/run.json").read_text())
    assert run["llm_judges"]["wise"]["requests"] == 80
    assert server.url not in json.dumps(manifest)
    files = [path for path in output.rglob("*") if path.is_file()]
    assert all(SECRET.encode() not in path.read_bytes() for path in files)
    # All but the replies, as if the results had been deleted everywhere.
    shutil.rmtree(output / "data")
    shutil.rmtree(output / "store")
    workflow.build(TARGET)
    assert len(server.requests) == 80
    again = json.loads((output / "data/labelled.manifest.json").read_text())
    assert again["files"] == manifest["files"]
    run = json.loads((output / "data/labelled/run.json").read_text())
    assert run["llm_judges"]["wise"]["requests"] == 0
    assert run["llm_judges"]["wise"]["cache_hits"] == 80
