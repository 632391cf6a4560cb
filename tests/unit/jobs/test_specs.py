"""Specs: what determines a result is in them, and nothing else."""

import json
from pathlib import Path

from conftest import ROOT
from snakechat.jobs.descriptions import Description
from snakechat.jobs.rules import Rule
from snakechat.jobs.specs import Specs
from snakechat.workflow.manifest import without_names
from snakechat.workflow.snapshot import write_spec
from support.configs import load
from support.specs import specs_of_rules


def test_the_code_of_a_spec_has_the_reward_functions_of_its_settings(tmp_path):
    description = Description({"reward_functions": {"mine": 1}})
    rules = {"train": Rule(lambda config, name: description, "models/train", "tool")}
    specs = specs_of_rules(tmp_path, ["tool"], rules)
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards/mine.py").write_text("WORDS = []\n")
    spec, _ = specs.spec("train", "a")
    assert spec["code"].keys() == {"tool.py", "rewards/mine.py"}


def test_a_damaged_spec_file_is_written_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = {"rule": "train", "name": "sft/a", "settings": {"rate": 1}}
    path = Path(write_spec(spec))
    text = path.read_text()
    path.write_text(text.replace("rate", "other", 1))
    assert write_spec(spec) == str(path)
    assert path.read_text() == text and json.loads(text) == spec


def test_a_sweep_over_placements_has_a_training_of_each():
    over = {"placement": ["cpu", "multi_node"], "learning_rate": [0.1]}
    sweep = {"stage": "sft", "recipe": "tiny", "over": over}
    specs = Specs(load({"sweeps": {"mine": sweep}}), ROOT)
    names = [f"mine-placement-{each}-learning_rate-0.1" for each in over["placement"]]
    trained = [without_names(specs.spec("train_sft", name)[0]) for name in names]
    assert [spec.pop("placement") for spec in trained] == over["placement"]
    tokens = [without_names(specs.spec("tokenize_sft", name)[0]) for name in names]
    assert tokens[0] == tokens[1] and trained[0] == trained[1]
