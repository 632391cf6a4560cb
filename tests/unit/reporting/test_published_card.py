"""The model card that is uploaded to the Hugging Face Hub."""

import pytest
from huggingface_hub import ModelCard

from snakechat.reporting.published_card import (
    evaluated_datasets,
    evaluation_results,
    published_card,
    without_paths,
)
from snakechat.workflow.errors import InputError
from support.hub_uploads import card_errors
from support.lineages import LINEAGE

CARD = """---
library_name: transformers
tags: [snakechat, reward]
---
# mine

model = AutoModel.from_pretrained("output/reward/mine")

## Sources

Spec `0123`, seed 1.
"""
METRICS = {"pairs": 100, "accuracy": 0.75, "ties": 0.0, "loss": float("nan"), "margin": 0.5}


def card_of(card=CARD, metrics=METRICS, license=None, datasets=None):
    """Return the card of a reward model."""
    results = evaluation_results("reward", metrics)
    return published_card(
        card, "lab/mine", "output/reward/mine", results, datasets or {"toy": "toy"}, license
    )


def test_results_are_metadata_and_a_table():
    text = card_of()
    [accuracy] = [of for of in ModelCard(text).data.eval_results if of.metric_type == "accuracy"]
    assert (accuracy.metric_value, accuracy.dataset_name) == (0.75, "held-out rows of toy")
    assert accuracy.task_type == "text-classification"
    assert "| accuracy | 0.75 | 0.657 to 0.8245 |\n" in text
    # NaN is no result.
    assert "loss" not in text
    assert text.index("## Evaluation") < text.index("## Sources") and "seed 1." in text
    assert card_errors(text) == []
    # Of its own card, too: a section replaces the one before.
    assert card_of(text) == text


def test_results_of_chat_models():
    metrics = {
        "rlhf": {"score": {"mean": 1.5, "interval_95": [1, 2]}, "length": 9.0},
        "wins": {"rlhf": {"sft": {"score": 0.6}}},
        "intervals_95": {"wins": {"rlhf": {"sft": {"score": [0.5, 0.7]}}}},
    }
    found = {of.label: of.figure for of in evaluation_results("rlhf", metrics)}
    assert found["score"] == (1.5, [1, 2])
    assert found["win rate against SFT by score"].value == 0.6
    metrics = {"before": {"perplexity": 9.0}, "after": {"perplexity": 2.0}}
    assert [of.figure.value for of in evaluation_results("sft", metrics)] == [2.0]


def test_a_card_names_the_repository_and_the_datasets():
    text = card_of()
    assert 'from_pretrained("lab/mine")' in text
    settings = [{"seed": 1}, {"datasets": [["public", 1], ["toy", 0.5]]}]
    datasets = evaluated_datasets(LINEAGE, settings)
    assert datasets == {"public": "lab/public", "toy": "toy"}
    assert evaluated_datasets(LINEAGE, [{"datasets": ["toy"]}]) == {"toy": "toy"}
    [result, *_] = ModelCard(card_of(datasets={"public": "lab/public"})).data.eval_results
    assert result.dataset_type == "lab/public"


def test_a_card_without_an_evaluation_has_no_results():
    data = ModelCard(card_of(metrics={})).data
    assert data.eval_results is None and data.pipeline_tag == "text-classification"


@pytest.mark.parametrize(
    ("license", "expected"),
    [("mit", ("mit", None)), ("opt-175b", ("other", "opt-175b")), (None, (None, None))],
)
def test_a_licence_is_one_that_the_hub_takes(license, expected):
    data = ModelCard(card_of(license=license)).data
    assert (data.license, data.get("license_name")) == expected
    # A person's licence stays.
    edited = CARD.replace("tags:", "license: cc-by-4.0\ntags:")
    assert ModelCard(card_of(edited, license=license)).data.license == "cc-by-4.0"


def test_damaged_metadata_are_one_line():
    with pytest.raises(InputError, match=r"output/reward/mine/README.md: its metadata cannot be"):
        card_of(CARD.replace("[snakechat", "[[snakechat"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--configfile /home/me/my-project/mine.yaml", "--configfile mine.yaml"),
        (
            "OPTIONS='--configfile \"/data/team x/a.yaml\"'",
            "OPTIONS='--configfile \"team x/a.yaml\"'",
        ),
        ("{path: /data/secret/rows, split: 1}", "{path: rows, split: 1}"),
        ("a=/data/x/y", "a=y"),
        ("https://huggingface.co/lab/mine", "https://huggingface.co/lab/mine"),
        ("| policy/loss | output/eval/sft/mine |", "| policy/loss | output/eval/sft/mine |"),
        ("a / b, `</div>`, 1/2/3", "a / b, `</div>`, 1/2/3"),
    ],
)
def test_absolute_paths_are_shortened(text, expected):
    assert without_paths(text) == expected


def test_paths_in_this_folder_are_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert without_paths(f"--configfile {tmp_path}/conf/a.yaml") == "--configfile conf/a.yaml"
