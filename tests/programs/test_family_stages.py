"""The table of model families and stages: each family trains in each stage and is of use after it.

`pytest -v tests/programs/test_family_stages.py` prints the table, one line per cell (sft-mistral).
"""

import contextlib
import json
import math
import os
import warnings
from logging.handlers import BufferingHandler
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from chat import ChatSession
from snakechat.modeling.batching import Examples
from support.chat_templates import script_ids
from support.configs import load
from support.families import CHECKPOINTS, save_checkpoint
from support.stages import Stages

pytestmark = pytest.mark.slow

STAGES = ("sft", "reward", "dpo", "grpo")
# Two optimizer steps in fp32, where packed and unpacked agree to rounding.
SMALL = {"epochs": 1, "global_batch_size": 4, "dtype": "fp32", "placement": {"deployment": "cpu"}}
SMALL |= {"datasets": ["toy"], "warmup_steps": 0}
ONE_MODEL = {**SMALL, "max_length": 384, "learning_rate": 1.0e-3}
GRPO = {
    **SMALL,
    "algorithm": "grpo",
    "actor": "sft/family",
    "reward": "reward/family",
    "max_prompt_length": 384,
    "max_response_length": 8,
    "rollout_batch_size": 4,
    "num_generations": 2,
    "global_batch_size": 8,
    "actor_learning_rate": 1.0e-3,
}
DIALOGUES = [
    ("What is the capital of France?", "The capital of France is Paris.", "I do not know."),
    ("How do I boil an egg?", "Put it in boiling water.\n\nThen cool it.", "Buy one."),
    ("为什么天空是蓝色的?", "因为空气散射蓝光。", "不知道。"),
    (
        "Name a river.\n\nAssistant: The Seine.\n\nHuman: And where is it?",
        "In France: Paris is on the Seine.",
        "In 1 of 200 countries.",
    ),
    ("Write f(x) = x² in Python.", "def f(x):\n    return x**2", "f = x"),
]
RESPONSE = "Put it in boiling water."


def records():
    """Rows of both splits, in the form of records."""
    rows = [
        (f"\n\nHuman: {number}. {prompt}\n\nAssistant:", f" {chosen}", f" {rejected}")
        for number in range(3)
        for prompt, chosen, rejected in DIALOGUES
    ]
    return {"train": rows[:8], "eval": rows[8:12]}


@pytest.fixture(scope="module")
def checkpoint(request):
    return CHECKPOINTS[request.param]


@pytest.fixture(scope="module")
def stages(checkpoint, group, tmp_path_factory):
    """The results of the family's recipes, in a working directory of their own."""
    folder = tmp_path_factory.mktemp("family")
    base = save_checkpoint(checkpoint, folder / "base")
    changes = {"models": {"family": {"path": str(base), "template": checkpoint.template}}}
    recipes = {"sft": ONE_MODEL, "reward": ONE_MODEL, "dpo": ONE_MODEL, "rlhf": GRPO}
    for stage, recipe in recipes.items():
        model = {} if stage == "rlhf" else {"model": "sft/family" if stage == "dpo" else "family"}
        changes[stage] = {"recipes": {"family": {**recipe, **model}}}
    before = Path.cwd()
    os.chdir(folder)
    yield Stages(load(changes), folder, records(), {"family": base})
    os.chdir(before)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, indirect=True, scope="module")
@pytest.mark.parametrize("stage", STAGES)
def test_a_family_trains_and_is_of_use(stage, stages, checkpoint):
    rule = {"grpo": "train_rlhf"}.get(stage, f"train_{stage}")
    result = stages.result(rule, "family")
    lines = [json.loads(line) for line in (result / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"]]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(math.isfinite(value) for line in steps for value in line.values())
    is_reward = stage == "reward"
    auto_class = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
    model, tokenizer = load_silently(auto_class, result)
    if is_reward:
        tokens = stages.result("tokenize_reward", "family")
        check_scores(model, tokenizer, Examples.read(tokens, "eval", "chosen"))
        return
    check_batches(model, tokenizer)
    check_ends_of_turns(model, tokenizer, result, checkpoint)


def check_scores(model, tokenizer, examples):
    """Padded rows and single rows have the same scores."""
    rows = zip(examples.prompts, *examples.responses, strict=True)
    sequences = [[*prompt.tolist(), *response.tolist()] for prompt, response in rows]
    with torch.no_grad():
        single = [model(torch.tensor([ids])).logits.item() for ids in sequences]
        padded = tokenizer.pad({"input_ids": sequences}, return_tensors="pt", padding_side="right")
        batched = model(**padded).logits.flatten().tolist()
    assert np.std(single) > 0.01
    assert batched == pytest.approx(single, rel=1e-4, abs=1e-5)


def check_batches(model, tokenizer):
    """A batch of prompts is continued as each prompt alone."""
    prompts = ["How do I boil an egg?", "Name a river that is on the way to Paris."]
    options = {"max_new_tokens": 4, "do_sample": False, "return_full_text": False}
    with silence():
        generate = transformers.pipeline("text-generation", model, tokenizer=tokenizer)
        together = generate(prompts, batch_size=2, **options)
        assert together == [generate([prompt], **options)[0] for prompt in prompts]


def check_ends_of_turns(model, tokenizer, folder, checkpoint):
    """Each stop token ends a response, in transformers and in chat."""
    session = ChatSession(folder)
    session.temperature, session.max_tokens = 0, 40
    ids = tokenizer(RESPONSE, add_special_tokens=False).input_ids
    prompt = torch.tensor([tokenizer("How do I boil an egg?").input_ids])
    for stop in {checkpoint.end_of_turn, *checkpoint.stops}:
        script = [*ids, tokenizer.convert_tokens_to_ids(stop), *ids]
        with script_ids(model, script), silence():
            output = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=99
            )
        assert output[0, prompt.shape[1] :].tolist() == script[: len(ids) + 1]
        prompt_ids, _ = session.encode("How?")
        with script_ids(session.model, script):
            response = session.respond("How?", prompt_ids, lambda text: None)
        assert response == RESPONSE


def load_silently(auto_class, folder):
    """Load a model and its tokenizer; fail if that warns of anything."""
    with silence():
        model, loading = auto_class.from_pretrained(folder, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    assert not any(loading.values()), loading
    return model.eval(), tokenizer


@contextlib.contextmanager
def silence():
    """Fail if transformers or Python warns."""
    handler, verbosity = BufferingHandler(1000), transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    transformers.logging.add_handler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        transformers.logging.remove_handler(handler)
        transformers.logging.set_verbosity(verbosity)
    assert not [record.getMessage() for record in handler.buffer]
