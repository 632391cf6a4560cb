"""The metrics of a training, while it runs."""

import json

import pytest

from snakechat.reporting.training_log import TrainingLog, flatten
from snakechat.workflow.errors import InputError


@pytest.fixture
def training(tmp_path):
    """A running training: step 2 has no times yet, and step 3 is being written."""
    output = tmp_path / "output"
    growing = output / "sft/.mine.tmp"
    logs = output / "logs/train_sft/mine"
    specs = output / "specs/train_sft"
    for folder in (growing, logs, specs):
        folder.mkdir(parents=True)
    spec = {"rule": "train_sft", "settings": {"seed": 1, "placement": {"nodes": 1}}}
    (specs / "mine-0123.json").write_text(json.dumps(spec))
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (growing / "metrics.jsonl").write_text(text + '{"step": 3, "lo')
    (logs / "times.jsonl").write_text('{"step": 1, "train": 0.5}\n')
    return output / "sft/mine"


def test_the_newest_step_waits_for_its_times(training):
    log = TrainingLog(training)
    assert not log.is_finished
    first = (1, {"loss": 3.0, "times/train": 0.5})
    assert list(log.read(is_finished=False)) == [first]
    assert list(log.read(is_finished=True)) == [first, (2, {"loss": 2.0})]
    assert list(log.read(after=1)) == [(2, {"loss": 2.0})]


def test_settings_have_the_names_of_nested_keys(training):
    assert TrainingLog(training).settings() == {"seed": 1, "placement.nodes": 1}
    assert flatten({"a": {"b": 1, "c": {"d": [2]}}}) == {"a.b": 1, "a.c.d": [2]}


def test_a_training_without_an_evaluation_has_no_figures(training):
    assert TrainingLog(training).evaluation() == {}


def test_a_folder_that_is_no_training_is_an_error(tmp_path):
    with pytest.raises(InputError, match="is no training that has started"):
        TrainingLog(tmp_path / "output/sft/mine")
