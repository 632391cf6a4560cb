"""Scores of good and bad responses by a reward model: as in training, ties, the base model."""

import json

import numpy as np
import pytest
import torch
from test_prompt_eval import prompt_job
from transformers import AutoModelForSequenceClassification

import rw_eval

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
    scores = iter((SCORES, SCORES[::-1].copy()))
    monkeypatch.setattr(rw_eval, "response_scores", lambda *_: next(scores))
    rows, metrics = scored(job)
    assert [row["margin"] for row in rows] == [1, 0, -2, 0.5]
    assert [row["base_margin"] for row in rows] == [-1, 0, 2, -0.5]
    keys = "pairs", "accuracy", "ties", "margin"
    for of, values, base_accuracy in (
        (metrics, [4, 0.5, 0.25, -0.125], 0.25),
        (metrics["by_dataset"]["toy"], [3, 1 / 3, 1 / 3, -1 / 3], 1 / 3),
        (metrics["by_dataset"]["en"], [1, 1.0, 0.0, 0.5], 0.0),
    ):
        assert [of[key] for key in keys] == pytest.approx(values)
        assert of["base"]["accuracy"] == base_accuracy
        low, high = of["intervals_95"]["accuracy"]
        assert 0 <= low < of["accuracy"] <= high <= 1
