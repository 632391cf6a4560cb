"""Responses to the prompts of users: models and decoders, prompt sets."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

import prompt_eval
from conftest import INIT, ROOT
from snakechat.data.prompt_sets import read_pairs, read_prompts
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.generation import HfSampler
from snakechat.modeling.loading import load_causal
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from snakechat.workflow.digests import file_digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.placement import RunOptions
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
    files = {f"{kind}/{name}.yaml": file_digest(folder / kind / f"{name}.yaml") for name in sets}
    return SimpleNamespace(
        settings=SimpleNamespace(**settings),
        placement=PLACEMENT,
        options=RunOptions(source=str(folder)),
        spec={"name": "rlhf/tiny", "files": files},
        inputs=inputs,
        result=result,
    )


def evaluated(job):
    """Responses by model, decoder and prompt."""
    prompt_eval.main(job)
    lines = map(json.loads, (job.result / "responses.jsonl").read_text().splitlines())
    return {(line["model"], line["decoder"], line["prompt"]): line for line in lines}


def test_each_model_responds_to_each_prompt_with_each_decoder(job):
    responses = evaluated(job)
    models, decoders = ["base", "sft", "rlhf", "ema"], ["greedy", "sampled"]
    assert list(responses) == [
        (m, d, prompt) for prompt in PROMPTS for m in models for d in decoders
    ]
    for decoder in decoders:
        for prompt in PROMPTS:
            texts = [responses[model, decoder, prompt]["text"] for model in models]
            # Only the models with the same weights respond the same.
            assert texts[1] == texts[3] and len(set(texts)) == 3


def test_greedy_and_sampled_responses_are_those_of_the_sampler(job, tokenizer):
    responses = evaluated(job)
    # As in training.
    ids = [tokenizer(f"\n\nHuman: {prompt}\n\nAssistant:").input_ids for prompt in PROMPTS]
    model = load_causal(job.inputs["rlhf"], "fp32", tokenizer)
    for decoder, temperature in (("greedy", 0), ("sampled", 1.0)):
        torch.manual_seed(1)
        [drawn] = sample_responses(model, ids, HfSampler([tokenizer.eos_token_id], 12, temperature))
        for prompt, response in zip(PROMPTS, drawn, strict=True):
            line = responses["rlhf", decoder, prompt]
            assert line["text"] == tokenizer.decode(response, skip_special_tokens=True)
            assert line["ended"] == (response[-1] == tokenizer.eos_token_id)
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

    monkeypatch.setattr("snakechat.evaluation.sample_responses.sample_on_all_ranks", sample)
    evaluated(job)
    path = Path(job.options.source, "prompts/ours.yaml")
    path.write_text("- Say </s> twice\n")
    job.spec["files"]["prompts/ours.yaml"] = file_digest(path)
    with pytest.raises(InputError, match="prompt 'Say </s> twice' contains a special token"):
        prompt_eval.main(job)


def test_responses_fill_the_positions_of_the_model(job, tmp_path):
    job.settings.max_response_length = 1000
    responses = evaluated(job)
    assert any(not line["ended"] for line in responses.values())
    job = prompt_job(tmp_path / "long", job.inputs, {"long": ["hat " * 100]})
    with pytest.raises(InputError, match="exceed the model's 64 positions"):
        prompt_eval.main(job)


# --- sets of prompts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("prompts", "- Hi?\n- 12\n", "entry 2: expected a text, found 12: put the text in quotes"),
        ("prompts", "Hi?\n", "expected a list"),
        ("prompts", "- 'Hi\n", "is not valid YAML: while scanning"),
        (
            "prompts/pairs",
            "- {prompt: a, chosen: b}\n",
            "found {'prompt': 'a', 'chosen': 'b'}",
        ),
        ("prompts/pairs", "- {prompt: a, chosen: b, rejected: no}\n", "entry 1, rejected: exp"),
    ],
)
def test_errors_in_a_file_name_it_and_the_entry(tmp_path, kind, text, message):
    (tmp_path / kind).mkdir(parents=True)
    path = tmp_path / kind / "mine.yaml"
    path.write_text(text)
    read = read_prompts if kind == "prompts" else read_pairs
    with pytest.raises(InputError, match=re.escape(message)) as error:
        read(["mine"], tmp_path)
    assert str(path) in str(error.value)


def test_every_set_has_prompts_and_pairs():
    names = [path.stem for path in sorted((ROOT / "prompts").glob("*.yaml"))]
    assert names == ["en", "ja", "toy", "zh"]
    for read in (read_prompts, read_pairs):
        assert list(dict(read(names, ROOT))) == names
