"""The README.md of a model folder."""

import importlib.metadata
import json
import os
import shlex
import subprocess
from types import SimpleNamespace

import pytest
import yaml

from snakechat.reporting.model_card import origin_of, processors, rebuild_commands, write_card
from snakechat.workflow.digests import digest
from support import lineages

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
def test_the_origin_of_a_job(origin):
    entry = {"facts": {}, "files": {"number": 0, "digest": digest({})}, **ORIGINS[origin]}
    assert origin_of(entry, entry["facts"].get("licence")) == origin


def entry(rule, hub, licence=None):
    """An entry of a lineage: a job that downloaded something from the hub."""
    facts = {"commit": rule[0] * 40} | ({"licence": licence} if licence else {})
    return {
        "rule": rule,
        "name": hub.partition("/")[2],
        "settings": {"hub": hub, "revision": "main"},
        "facts": facts,
        "files": {"number": 0, "digest": digest({})},
        "spec": digest(hub),
        "inputs": [],
    }


LINEAGE = {
    "output/models/base": entry("fetch_model", "mine/base", "opt"),
    "output/data/pairs": entry("import_dataset", "mine/pairs"),
}


def card_of(folder, rule="train_sft", lineage=LINEAGE, options=None, licenses=()):
    """Write a card; return its metadata and its text."""
    path = f"output/{rule.removeprefix('train_')}/mine"
    spec = {"rule": rule, "name": "mine", "path": path, "settings": {"seed": 7, "datasets": []}}
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 1.25, "rate": 1e-5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    placement = {"nodes": 1, "gpus_per_node": 0, "threads": 2, "licenses": dict(licenses)}
    if options is not None:
        placement["options"] = options
    job = SimpleNamespace(spec=spec, lineage=lineage, result=folder, placement=placement)
    write_card(job)
    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    assert f"Spec `{digest(spec)}`, seed 7." in text
    return yaml.safe_load(metadata), text


def test_a_card_names_sources_and_the_last_step(tmp_path):
    metadata, text = card_of(tmp_path)
    assert metadata == {
        "library_name": "transformers",
        "tags": ["snakechat", "sft"],
        "base_model": ["mine/base"],
        "datasets": ["mine/pairs"],
        "license": "opt",
    }
    assert "| loss | 1.25 |\n| rate | 1e-05 |" in text and "| loss | 3 |" not in text
    origin = f"mine/base at {'f' * 40}, licence opt"
    assert f"| output/models/base | {origin} | `{digest('mine/base')[:16]}` |" in text
    assert "`python scripts/chat.py output/sft/mine`" in text
    assert '\n "seed": 7\n' in text
    assert "\n\n\n" not in text


def test_a_card_names_the_versions_that_are_installed(tmp_path, monkeypatch):
    versions = {"torch": "1.2.3+cpu", "peft": "4.5"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    _, text = card_of(tmp_path)
    assert "\nSoftware: torch 1.2.3+cpu, peft 4.5. " in text


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        ({"nodes": 1, "gpus_per_node": 0, "threads": 3}, "CPU, 3 threads"),
        ({"nodes": 1, "gpus_per_node": 1, "threads": 8}, "1 GPU"),
        ({"nodes": 2, "gpus_per_node": 8, "threads": 64}, "16 GPUs"),
    ],
)
def test_a_card_names_what_changes_the_rounding(placement, text):
    assert processors(placement).startswith(text)


def test_a_card_names_the_threads(tmp_path):
    assert "Hardware: CPU, 2 threads" in card_of(tmp_path)[1]


def test_a_reward_model_is_no_chat_model(tmp_path):
    _, text = card_of(tmp_path, "train_reward")
    assert "AutoModelForSequenceClassification" in text and "chat.py" not in text


def test_a_card_without_a_license_has_no_such_key(tmp_path):
    lineage = LINEAGE | {"output/models/other": entry("fetch_model", "mine/other", "mit")}
    metadata, _ = card_of(tmp_path, lineage=lineage)
    assert "license" not in metadata


def test_a_card_has_a_statement_of_its_data(tmp_path):
    lineage = {path: entry for path, entry in lineages.LINEAGE.items() if "sft" not in path}
    lineage["output/filtered/mine"] = lineages.entry(
        "filter_dataset",
        "mine",
        {"exact_duplicates": True},
        ["output/data/mine"],
        filtered={"train": {"exact_duplicates": 3}},
    )
    _, text = card_of(tmp_path, lineage=lineage)
    overlap = "sft.train and reward.train 131"
    assert "| public | public | cc-by-nc-4.0 | en, zh | train 76,256, eval 5,103 |" in text
    assert "tie 15, bad row 1, excluded 2 |" in text and overlap in text
    assert "| mine | local files | unknown |  | train 50 | exact_duplicates 3 |  |" in text
    assert "| toy | generated by the build |  |  | train 600 |  |  |" in text


def test_a_license_from_the_hub_that_is_no_word_is_unknown(tmp_path):
    lineage = {"output/models/base": entry("fetch_model", "a/b", "x|y <script>")}
    metadata, text = card_of(tmp_path, lineage=lineage)
    assert "<script>" not in text and "license" not in metadata


def test_a_declared_license_replaces_the_recorded_one(tmp_path):
    declared = {"output/models/base": "mit", "output/data/pairs": "odc-by"}
    metadata, text = card_of(tmp_path, licenses=declared)
    assert metadata["license"] == "mit"
    assert f"mine/base at {'f' * 40}, licence mit |" in text
    assert f"mine/pairs at {'i' * 40}, licence odc-by |" in text


def test_the_commands_of_a_card_have_the_options_of_the_build(tmp_path):
    _, text = card_of(tmp_path)
    assert "\nsnakemake --cores 1 output/sft/mine\n" in text
    assert "\nmake reproduce TARGET=output/sft/mine\n" in text
    _, text = card_of(tmp_path, options=["--configfile", "my file.yaml"])
    assert "\nsnakemake --cores 1 output/sft/mine --configfile 'my file.yaml'\n" in text


def test_shell_and_make_pass_on_the_options_unchanged(tmp_path):
    options = ["--configfile", "a b.yaml", "--config", "x=$HOME", "y={z: 'q'}"]
    commands = rebuild_commands("output/sft/mine", options)
    assert shlex.split(commands["build"])[-5:] == options
    (tmp_path / "Makefile").write_text("reproduce:\n\t@printf '%s\\n' $(OPTIONS)\n")
    # Without the flags of a make that runs the tests.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    process = subprocess.run(
        commands["compare"],
        shell=True,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert process.stdout.splitlines() == options
