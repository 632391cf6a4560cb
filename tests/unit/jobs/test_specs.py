"""Specs: what determines a result is in them, and nothing else."""

import json
from pathlib import Path

import pytest

from conftest import ROOT
from snakechat.jobs.descriptions import Description
from snakechat.jobs.rules import Rule
from snakechat.jobs.specs import Specs
from snakechat.workflow.digests import digest
from snakechat.workflow.manifest import without_names
from snakechat.workflow.snapshot import write_spec
from support.configs import load
from support.specs import specs_of_rules


@pytest.fixture
def specs(tmp_path, monkeypatch):
    """Specs of two rules: `read` reads a file, `train` reads the result of `read`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.txt").write_text("one\n")

    def read(config, name):
        return Description({"source": name}, files={"rows": tmp_path / "rows.txt"})

    def train(config, stage, name):
        return Description({"rate": 0.1, "stage": stage}, inputs={"rows": ("read", name)})

    rules = {
        "read": Rule(read, "data", "read"),
        "train": Rule(train, "models/train", "tool"),
    }
    return specs_of_rules(tmp_path, ("read", "tool"), rules)


def test_a_spec_holds_settings_inputs_files_code_and_pins(specs):
    upstream, _ = specs.spec("read", "a")
    spec, spec_digest = specs.spec("train", "sft/a")
    assert spec["rule"] == "train" and spec["name"] == "sft/a"
    assert spec["path"] == "output/models/train/sft/a"
    assert spec["settings"] == {"rate": 0.1, "stage": "sft"}
    assert spec["inputs"] == {"rows": {"rule": "read", "name": "a", "path": "output/data/a"}}
    assert spec["code"].keys() == {"tool.py"}
    assert upstream["files"].keys() == {"rows"}
    assert upstream["code"].keys() == {"read.py"}
    assert spec_digest == digest(spec)
    assert specs.manifest("train", "sft/a") == "output/models/train/sft/a.manifest.json"


def test_the_code_of_a_spec_has_the_reward_functions_of_its_settings(specs, tmp_path):
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards/mine.py").write_text("WORDS = []\n")
    description = Description({"reward_functions": {"mine": 1}})
    rules = {"train": Rule(lambda config, name: description, "models/train", "tool")}
    spec, _ = Specs(specs.config, tmp_path, rules).spec("train", "a")
    assert spec["code"].keys() == {"tool.py", "rewards/mine.py"}


def test_a_damaged_spec_file_is_written_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = {"rule": "train", "name": "sft/a", "settings": {"rate": 1}}
    path = Path(write_spec(spec))
    text = path.read_text()
    assert json.loads(text) == spec
    path.write_text(text.replace("rate", "other", 1))
    assert write_spec(spec) == str(path)
    assert path.read_text() == text


def test_a_sweep_over_placements_has_a_training_of_each():
    over = {"placement": ["cpu", "multi_node"], "learning_rate": [0.1]}
    sweep = {"stage": "sft", "recipe": "tiny", "over": over}
    specs = Specs(load({"sweeps": {"mine": sweep}}), ROOT)
    names = [f"mine-placement-{each}-learning_rate-0.1" for each in over["placement"]]
    trained = [without_names(specs.spec("train_sft", name)[0]) for name in names]
    assert [spec.pop("placement") for spec in trained] == over["placement"]
    tokens = [without_names(specs.spec("tokenize_sft", name)[0]) for name in names]
    assert tokens[0] == tokens[1] and trained[0] == trained[1]
