"""What recipes expect, as specs have it, and baseline files."""

import json

import pytest

from snakechat.config.expectations import (
    BASELINE,
    baseline_inputs,
    expectation_settings,
    expectations,
    expected_metrics,
    is_judged,
)
from snakechat.workflow.errors import InputError
from support.configs import load

FILE = {
    BASELINE: 1,
    "stage": "reward",
    "recipe": "old",
    "figures": {"accuracy": [0.6, [0.5, 0.7]]},
    "measures": {},
}


def tiny(stage="reward", root=None, **settings):
    """The config with settings of a tiny recipe."""
    changes = {stage: {"recipes": {"tiny": settings}}}
    return load(changes, root) if root else load(changes)


def test_expectations_are_no_settings_of_a_training():
    config = tiny(expect={"accuracy": {"min": 0.6}}, not_worse_than="judge")
    assert config.program_settings("reward", "tiny") == load().program_settings("reward", "tiny")
    expected = {"expect": {"accuracy": {"min": 0.6}}, "not_worse_than": "judge"}
    assert expectations(config, "reward", "tiny") == expected
    recipes = {"sft": "tiny", "reward": "tiny"}
    assert expectation_settings(config, recipes) == {"expectations": {"reward": expected}}
    assert baseline_inputs(config, recipes) == {"baseline.reward": ("evaluate_reward", "judge")}
    # Specs of pages about other recipes stay as they were.
    assert expectation_settings(config, {"sft": "tiny"}) == {}


def test_recipes_without_expectations_are_judged_as_long_as_their_cards_show_some(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert is_judged(tiny(expect={"loss": {"max": 1}}), "reward", "tiny")
    assert is_judged(tiny(not_worse_than="judge"), "reward", "tiny")
    assert not is_judged(load(), "reward", "tiny")
    card = tmp_path / "output/reward/tiny/README.md"
    card.parent.mkdir(parents=True)
    card.write_text("# tiny\n\n## Expectations\n\n- met\n")
    assert is_judged(load(), "reward", "tiny")


def test_metrics_depend_on_the_models_and_datasets_of_a_recipe():
    metrics = expected_metrics(load(), "rlhf", "tiny")
    assert {"rlhf.kl_to_sft", "wins.rlhf.base.judge_score", "rlhf.success"} <= {*metrics}
    assert "by_dataset.toy.rlhf.score" in metrics
    config = tiny("rlhf", actor="models/tiny", judge=None)
    metrics = expected_metrics(config, "rlhf", "tiny")
    assert "rlhf.kl_to_base" in metrics
    assert not [metric for metric in metrics if "judge" in metric or "sft" in metric]
    assert "by_dataset.toy.accuracy" not in expected_metrics(load(), "reward", "tiny")
    config = tiny(datasets=["toy", "toy-judge"])
    assert "by_dataset.toy.accuracy" in expected_metrics(config, "reward", "tiny")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no JSON", "is no baseline: write one with python scripts/bless.py output/reward/"),
        ("[]", "is no baseline"),
        (json.dumps({"accuracy": 0.6}), "is no baseline"),
        (json.dumps({**FILE, "figures": {}}), "is no baseline"),
        (json.dumps({**FILE, "figures": {"accuracy": 0.6}}), "is no baseline"),
        (json.dumps({**FILE, "figures": {"accuracy": [0.6, None]}}), "is no baseline"),
        (json.dumps({**FILE, "stage": "dpo"}), "is a baseline of stage dpo, expected reward"),
        (b"\xff", "is no baseline"),
        (None, "No such file or directory: write one with"),
    ],
)
def test_a_baseline_file_that_is_none_is_one_line(tmp_path, text, message):
    path = tmp_path / "old.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    config = tiny(not_worse_than=str(path))
    with pytest.raises(InputError) as error:
        expectations(config, "reward", "tiny")
    assert str(error.value).startswith("config: reward.recipes.tiny.not_worse_than: ")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_baseline_file_is_a_part_of_what_is_expected(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(FILE))
    config = tiny(not_worse_than=str(path))
    assert expectations(config, "reward", "tiny")["baseline"] == FILE
    assert baseline_inputs(config, {"reward": "tiny"}) == {}
