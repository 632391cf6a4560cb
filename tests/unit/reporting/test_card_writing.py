"""The results of an evaluation in the metadata of a model card."""

import pytest
import yaml
from huggingface_hub import ModelCard

from snakechat.reporting.card_writing import card_with_results, evaluated_datasets

CARD = """---
library_name: transformers
tags: [snakechat, reward]
---
# mine

## Sources

Spec `0123`, seed 1.
"""
BODY = CARD.partition("# mine")[2]


def results_of(stage, metrics, datasets=None, card=CARD):
    """Return the card and the values of its results by the path of the metric."""
    text = card_with_results(card, stage, "mine", metrics, datasets or {"toy": "toy"})
    found = ModelCard(text).data.eval_results or []
    return text, {result.metric_name: result.metric_value for result in found}


def test_results_are_metadata_and_the_text_stays():
    text, values = results_of("reward", {"pairs": 100, "accuracy": 0.75, "loss": 0.5})
    assert values == {"accuracy": 0.75, "loss": 0.5}
    data = ModelCard(text).data
    assert (data.model_name, data.pipeline_tag) == ("mine", "text-classification")
    assert (data.library_name, data.tags) == ("transformers", ["snakechat", "reward"])
    assert text.partition("# mine")[2] == BODY
    # Again, and with another evaluation.
    assert results_of("reward", {"accuracy": 0.75, "loss": 0.5}, card=text)[0] == text
    assert results_of("reward", {"accuracy": 0.5}, card=text)[1] == {"accuracy": 0.5}


def test_results_of_chat_models():
    metrics = {"after": {"response_perplexity": 2.0}}
    assert results_of("sft", metrics)[1] == {"after.response_perplexity": 2.0}
    metrics = {
        "sft": {},
        "rlhf": {"kl_to_sft": float("nan")},
        "score_difference": {"mean": 1.5, "interval_95": [1, 2]},
        "wins": {"rlhf": {"sft": {"score": 0.6}}},
    }
    assert results_of("rlhf", metrics)[1] == {"score_difference": 1.5, "wins.rlhf.sft.score": 0.6}


def test_results_name_the_datasets():
    training = {"settings": {"datasets": [["public", 1], ["toy", 0.5]]}}
    lineage = {
        "output/rlhf/mine": training,
        "output/data/public": {"settings": {"hub": "lab/public"}},
        "output/data/toy": {"settings": {"generate": "shop"}},
    }
    datasets = evaluated_datasets("output/rlhf/mine", lineage)
    assert datasets == {"public": "lab/public", "toy": "toy"}
    for names, kind, text in (
        ({"public": "lab/public"}, "lab/public", "public"),
        (datasets, "mixed", "public, toy"),
    ):
        [result] = ModelCard(results_of("dpo", {"accuracy": 1}, names)[0]).data.eval_results
        assert result.dataset_type == kind
        assert result.dataset_name == f"held-out rows of {text}"


def test_damaged_metadata_are_an_error():
    with pytest.raises(yaml.YAMLError):
        results_of("dpo", {"accuracy": 1}, card=CARD.replace("[snakechat", "[[snakechat"))
