"""Scores of good and bad responses by a reward model: as in training, ties, the base model."""

import json

import numpy as np
import pytest
import torch
from test_prompt_eval import prompt_job
from transformers import AutoModelForSequenceClassification

import rw_eval
from snakechat.workflow.errors import InputError

TOY = [
    {"prompt": "I need a hat.", "chosen": "Go to the boutique.", "rejected": "Go away, you bore!"},
    {"prompt": "A plum?", "chosen": "At the <market>.", "rejected": " At the <market>.\n"},
    {"prompt": "A book?", "chosen": "No.", "rejected": "At the library."},
]
ENGLISH = [{"prompt": "Is it so?", "chosen": "Yes, it is.", "rejected": "\n\nHuman: No."}]
# With a tie within rounding.
SCORES = np.array([[2.0, 1.0, 0.5, 3.0], [1.0, 1.0 + 1e-7, 2.5, 2.5]])


@pytest.fixture
def job(folder, scorer_folder, tmp_path):
    """A job with four pairs; the responses of the second pair are the same after stripping."""
    sets = {"toy": TOY, "en": ENGLISH}
    job = prompt_job(tmp_path, {"base": folder, "model": scorer_folder}, sets, "prompts/pairs")
    return job


def scored(job):
    """Rows and metrics."""
    rw_eval.main(job)
    rows = [json.loads(line) for line in (job.result / "scores.jsonl").read_text().splitlines()]
    return rows, json.loads((job.result / "metrics.json").read_text())


def test_scores_are_those_of_the_saved_model_at_the_last_token(job, tokenizer):
    rows, _ = scored(job)
    model = AutoModelForSequenceClassification.from_pretrained(job.inputs["model"]).eval()
    texts = {"\n\nHuman: No.": " Human: No."}
    assert [row["set"] for row in rows] == ["toy", "toy", "toy", "en"]
    for row, pair in zip(rows, TOY + ENGLISH, strict=True):
        for key in ("chosen", "rejected"):
            # A turn marker in a response does not start a turn.
            response = texts.get(pair[key], f" {pair[key].strip()}")
            prompt = tokenizer(f"\n\nHuman: {pair['prompt']}\n\nAssistant:").input_ids
            ids = prompt + tokenizer(response, add_special_tokens=False).input_ids
            with torch.no_grad():
                score = model(torch.tensor([[*ids, tokenizer.eos_token_id]])).logits.item()
            assert row[f"{key}_score"] == pytest.approx(score, abs=1e-4)
        assert row["margin"] == row["chosen_score"] - row["rejected_score"]


def test_ties_are_counted_and_not_correct(job, monkeypatch):
    scores = iter((SCORES[::-1], SCORES))
    monkeypatch.setattr(rw_eval, "response_scores", lambda *_: next(scores))
    rows, metrics = scored(job)
    assert [row["margin"] for row in rows] == [1, 0, -2, 0.5]
    assert [row["base_margin"] for row in rows] == [-1, 0, 2, -0.5]
    for each in (metrics, *metrics["sets"].values()):
        low, high = each.pop("intervals_95")["accuracy"]
        assert 0 <= low < each["accuracy"] <= high <= 1
    toy = {"pairs": 3, "accuracy": 1 / 3, "ties": 1 / 3, "margin": -1 / 3, "base_accuracy": 1 / 3}
    other = {"pairs": 1, "accuracy": 1.0, "ties": 0.0, "margin": 0.5, "base_accuracy": 0.0}
    assert metrics == {
        "pairs": 4,
        "accuracy": 0.5,
        "ties": 0.25,
        "margin": -0.125,
        "base_accuracy": 0.25,
        "sets": {"toy": toy, "en": other},
    }


def test_a_response_that_is_too_long_is_rejected(job, tmp_path):
    pair = {"prompt": "A hat?", "chosen": "hat " * 100, "rejected": "No."}
    long = prompt_job(tmp_path / "long", job.inputs, {"mine": [pair]}, "prompts/pairs")
    with pytest.raises(InputError, match="exceed the model's 64 positions"):
        rw_eval.main(long)
