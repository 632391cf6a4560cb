"""The jobs behind a result, from the manifests of its inputs; the card that tells them."""

import json
import shutil
from types import SimpleNamespace

import pytest
import yaml

from snakechat.reporting.model_card import origin_of, write_card
from snakechat.workflow.code_digests import REQUIREMENTS, pinned_versions
from snakechat.workflow.digests import digest
from snakechat.workflow.lineage import direct_inputs, lineage_columns, merge_lineages


def spec(path, *inputs, **settings):
    """A spec of the job of a path, made from these specs."""
    return {
        "rule": f"make_{path}",
        "name": path,
        "path": f"output/{path}",
        "settings": settings,
        "inputs": {one["name"]: {"path": one["path"], "spec": digest(one)} for one in inputs},
        "files": {},
        "code": {},
        "requirements": "pins",
    }


def manifest(of, *inputs, **facts):
    """The manifest of a spec, whose inputs have these manifests."""
    return {"spec": of, "lineage": merge_lineages(inputs), "facts": facts}


@pytest.fixture
def road():
    """Manifests of data -> split -> tokens and data -> model -> tokens."""
    data = manifest(spec("data", hub="mine/data", revision="main"), commit="abc123")
    split = manifest(spec("split", data["spec"]), data)
    model = manifest(spec("model", data["spec"]), data)
    tokens = manifest(
        spec("tokens", data["spec"], split["spec"], model["spec"]), data, split, model
    )
    return [data, split, model, tokens]


def test_all_jobs_behind_a_result_are_told_once(road):
    data, tokens = road[0], road[-1]
    assert set(tokens["lineage"]) == {"output/data", "output/split", "output/model"}
    assert tokens["lineage"]["output/data"] == {
        "rule": "make_data",
        "name": "data",
        "settings": {"hub": "mine/data", "revision": "main"},
        "facts": {"commit": "abc123"},
        "files": {"number": 0, "digest": digest({})},
        "spec": digest(data["spec"]),
        "inputs": [],
    }
    assert tokens["lineage"]["output/split"]["inputs"] == ["output/data"]
    assert data["lineage"] == {}


def test_each_job_stands_right_of_its_inputs(road):
    jobs = merge_lineages(road)
    assert lineage_columns(jobs) == [
        ["output/data"],
        ["output/model", "output/split"],
        ["output/tokens"],
    ]
    assert lineage_columns({}) == []


def test_an_input_that_another_was_made_from_is_no_direct_one(road):
    jobs = merge_lineages(road)
    assert direct_inputs(jobs, "output/tokens") == ["output/model", "output/split"]
    assert direct_inputs(jobs, "output/split") == ["output/data"]
    assert direct_inputs(jobs, "output/data") == []


ORIGINS = {
    "mine/data at abc123": {
        "settings": {"hub": "mine/data", "revision": "main"},
        "facts": {"commit": "abc123"},
    },
    "mine/data at abc123, licence mit": {
        "settings": {"hub": "mine/data", "revision": "main"},
        "facts": {"commit": "abc123", "licence": "mit"},
    },
    "3 files, `0123456789abcdef`": {
        "settings": {"format": "plain"},
        "files": {"number": 3, "digest": "0123456789abcdef" * 4},
    },
    "generated (shop, seed 7)": {"settings": {"generate": "shop", "seed": 7}},
    "random weights (seed 7)": {"settings": {"init": {}, "seed": 7}},
    "": {"settings": {"by": "row", "seed": 7}},
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_the_source_of_a_job_is_told(origin):
    entry = {"facts": {}, "files": {"number": 0, "digest": digest({})}, **ORIGINS[origin]}
    assert origin_of(entry) == origin


def test_card_names_revisions_seed_spec_versions_and_how_to_build_it_again(tmp_path):
    base = spec("models/base", hub="mine/base", revision="main") | {"rule": "fetch_model"}
    data = spec("data", hub="mine/data", revision="v1") | {"rule": "import_dataset"}
    facts = {"commit": "b" * 40, "licence": "opt"}
    lineage = merge_lineages([manifest(base, **facts), manifest(data, commit="d" * 40)])
    made = spec("sft/mine", base, data, seed=7) | {"rule": "train_sft"}
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 1.25, "rate": 1e-5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_card(SimpleNamespace(spec=made, lineage=lineage, result=tmp_path))
    card = (tmp_path / "README.md").read_text()
    _, metadata, text = card.split("---\n", 2)
    assert yaml.safe_load(metadata) == {
        "library_name": "transformers",
        "tags": ["snakechat", "sft"],
        "base_model": ["mine/base"],
        "datasets": ["mine/data"],
        "license": "opt",
    }
    assert "| loss | 1.25 |\n| rate | 1e-05 |" in text and "| loss | 3 |" not in text
    assert "`python scripts/chat.py output/sft/mine` talks to it." in text
    origin = f"mine/base at {'b' * 40}, licence opt"
    assert f"| output/models/base | {origin} | `{digest(base)[:16]}` |" in text
    assert f"| output/data | mine/data at {'d' * 40} | `{digest(data)[:16]}` |" in text
    assert f"Spec `{digest(made)}`, seed 7." in text
    assert f"torch {pinned_versions(REQUIREMENTS)['torch']}" in text
    assert "`snakemake --cores 1 output/sft/mine`" in text
    assert "`make reproduce TARGET=output/sft/mine`" in text


def test_a_checkpoint_that_was_copied_away_leads_to_every_ancestor(quick, tmp_path):
    folder = shutil.copytree(quick.folder / "output/rlhf/tiny", tmp_path / "mine")
    lineage = json.loads((folder / "manifest.json").read_text())["lineage"]
    assert set(lineage) == {
        f"output/{path}"
        for path in (
            "data/toy",
            "split/toy",
            "models/tiny",
            "tokens/sft/tiny",
            "tokens/reward/tiny",
            "tokens/rlhf/tiny",
            "sft/tiny",
            "reward/tiny",
        )
    }
    for path, entry in lineage.items():
        there = json.loads((quick.folder / f"{path}.manifest.json").read_text())
        assert entry["spec"] == digest(there["spec"])
        assert entry["settings"] == there["spec"]["settings"]
        assert set(entry["inputs"]) <= set(lineage)


def test_the_report_draws_it(quick):
    picture = (quick.folder / "output/report/tiny/lineage.svg").read_text()
    manifest = json.loads((quick.folder / "output/report/tiny.manifest.json").read_text())
    assert len(manifest["lineage"]) == 12
    # Texts are drawn as paths; each is told in a comment.
    for entry in manifest["lineage"].values():
        assert f"<!-- {entry['rule']} -->" in picture
        assert f"<!-- {entry['spec'][:12]} -->" in picture
