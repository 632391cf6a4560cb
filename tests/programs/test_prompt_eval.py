"""Prompts of users: responses of models and decoders, scores of pairs, prompt sets."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification

import prompt_eval
import rw_eval
from conftest import INIT, ROOT
from snakechat.data.tokenizers import load_tokenizer
from snakechat.data.yaml_files import PAIR_KEYS, read_prompts
from snakechat.evaluation import held_out_rows
from snakechat.modeling.generation import Sampler
from snakechat.modeling.loading import load_causal
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from snakechat.workflow.errors import InputError
from snakechat.workflow.processes import RunOptions
from support.evaluation import PLACEMENT
from support.passes import sample_responses

PROMPTS = ["My name is Pia and I need a hat.", "Where is a\nplum?"]


@pytest.fixture
def job(tokenizer, tmp_path):
    """A job with three different models, and an average (EMA) that equals the SFT model."""
    folders = {name: tmp_path / name for name in ("rlhf", "base", "sft")}
    for seed, folder in enumerate(folders.values()):
        save_model(make_causal({**INIT, "init_std": 0.2}, tokenizer, seed), tokenizer, folder)
    shutil.copytree(folders["sft"], folders["rlhf"] / "ema")
    return prompt_job(tmp_path, folders, {"ours": PROMPTS})


def prompt_job(folder, inputs, sets, kind="prompts"):
    """A job of prompt_eval or rw_eval, with sets of prompts or pairs."""
    (folder / kind).mkdir(parents=True)
    for name, entries in sets.items():
        (folder / kind / f"{name}.yaml").write_text(yaml.safe_dump(entries))
    settings = {"seed": 1, "dtype": "fp32", "template": "dialogue"}
    settings |= {"prompt_sets": list(sets), "max_response_length": 12, "temperature": 1.0}
    result = folder / "result"
    result.mkdir()
    return SimpleNamespace(
        settings=SimpleNamespace(**settings),
        placement=PLACEMENT,
        options=RunOptions(source=str(folder)),
        inputs=inputs,
        result=result,
    )


def evaluated(job):
    """Responses by model, decoder and prompt."""
    prompt_eval.main(job)
    lines = map(json.loads, (job.result / "responses.jsonl").read_text().splitlines())
    return {(line["model"], line["decoder"], line["prompt"]): line for line in lines}


def test_each_model_responds_to_each_prompt_with_each_decoder(job, tokenizer):
    responses = evaluated(job)
    models, decoders = ["base", "sft", "rlhf", "ema"], {"greedy": 0, "sampled": 1.0}
    assert list(responses) == [
        (m, d, prompt) for prompt in PROMPTS for m in models for d in decoders
    ]
    # As in training.
    ids = [tokenizer(f"\n\nHuman: {prompt}\n\nAssistant:").input_ids for prompt in PROMPTS]
    model = load_causal(job.inputs["rlhf"], "fp32", tokenizer)
    for decoder, temperature in decoders.items():
        torch.manual_seed(1)
        [drawn] = sample_responses(model, ids, Sampler([tokenizer.eos_token_id], 12, temperature))
        for prompt, response in zip(PROMPTS, drawn, strict=True):
            line = responses["rlhf", decoder, prompt]
            assert line["text"] == tokenizer.decode(response, skip_special_tokens=True)
            assert line["ended"] == (response[-1] == tokenizer.eos_token_id)
            texts = [responses[model, decoder, prompt]["text"] for model in models]
            # Only the models with the same weights respond the same.
            assert texts[1] == texts[3] and len(set(texts)) == 3
    job.settings.seed = 2
    again = evaluated(job)
    changed = {key[1] for key in responses if responses[key] != again[key]}
    assert changed == {"sampled"}


def test_the_template_of_the_settings_is_used(job, tokenizer, monkeypatch):
    job.settings.template = "chat"
    job.inputs = {"base": job.inputs["base"]}
    own = load_tokenizer(job.inputs["base"])
    own.chat_template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}"
        "{{ message.content }}{{ eos_token }}{% else %}<{{ message.content }}>{% endif %}"
        "{% endfor %}"
    )
    own.save_pretrained(job.inputs["base"])

    def sample(sampler, ids, *_):
        texts = [f"<{prompt}>" for prompt in PROMPTS]
        assert ids == tokenizer(texts, add_special_tokens=False).input_ids
        return [[[5]] * len(ids)], None

    monkeypatch.setattr("snakechat.evaluation.held_out_rows.sample_on_all_ranks", sample)
    evaluated(job)
    Path(job.options.source, "prompts/ours.yaml").write_text("- Say </s> twice\n")
    with pytest.raises(InputError, match="prompt 'Say </s> twice' contains a special token"):
        prompt_eval.main(job)


def test_responses_fill_the_positions_of_the_model(job, tmp_path):
    job.settings.max_response_length = 1000
    responses = evaluated(job)
    assert any(not line["ended"] for line in responses.values())
    job = prompt_job(tmp_path / "long", job.inputs, {"long": ["hat " * 100]})
    with pytest.raises(InputError, match="exceed the model's 64 positions"):
        prompt_eval.main(job)


# --- scores of pairs ------------------------------------------------------------------------------

TOY = [
    {"prompt": "I need a hat.", "chosen": "Go to the boutique.", "rejected": "Go away, you bore!"},
    {"prompt": "A plum?", "chosen": "At the <market>.", "rejected": " At the <market>.\n"},
    {"prompt": "A book?", "chosen": "No.", "rejected": "At the library."},
]
ENGLISH = [{"prompt": "Is it so?", "chosen": "Yes, it is.", "rejected": "\n\nHuman: No."}]
# With a tie within rounding.
SCORES = np.array([[2.0, 1.0, 0.5, 3.0], [1.0, 1.0 + 1e-7, 2.5, 2.5]])


@pytest.fixture
def pair_job(folder, scorer_folder, tmp_path):
    """A job with four pairs; the responses of the second pair are the same after stripping."""
    inputs = {"base": folder, "model": scorer_folder}
    return prompt_job(tmp_path, inputs, {"toy": TOY, "en": ENGLISH}, "prompts/pairs")


def scored(job):
    """Rows and metrics."""
    rw_eval.main(job)
    rows = [json.loads(line) for line in (job.result / "scores.jsonl").read_text().splitlines()]
    return rows, json.loads((job.result / "metrics.json").read_text())


def test_scores_are_those_of_the_saved_model_at_the_last_token(pair_job, tokenizer):
    rows, _ = scored(pair_job)
    model = AutoModelForSequenceClassification.from_pretrained(pair_job.inputs["model"]).eval()
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


def test_ties_are_counted_and_not_correct(pair_job, monkeypatch):
    scores = iter((SCORES, SCORES[::-1].copy()))
    monkeypatch.setattr(held_out_rows, "response_scores", lambda *_: next(scores))
    rows, metrics = scored(pair_job)
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


# --- sets of prompts ------------------------------------------------------------------------------


def test_every_set_has_prompts_and_pairs():
    names = [path.stem for path in sorted((ROOT / "prompts").glob("*.yaml"))]
    assert names == ["en", "ja", "toy", "zh"]
    assert list(dict(read_prompts(names, ROOT / "prompts"))) == names
    assert list(dict(read_prompts(names, ROOT / "prompts/pairs", PAIR_KEYS))) == names


@pytest.mark.parametrize(
    "text", ["- [", "- !!timestamp x", "- !!int {}", "- a\n- ' '", "- {a: b}", "- 3"]
)
def test_a_set_that_cannot_be_read_is_one_line(text, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(InputError, match=r"mine.yaml( is not valid YAML|, entry [12]: exp)[^\n]*$"):
        list(read_prompts(["mine"], tmp_path))
