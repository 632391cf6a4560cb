"""Reward models: whether they read ids or text, and their scores of conversations."""

import copy
import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from conftest import INIT
from init_model import train_tokenizer
from snakechat.algorithms.reward_models import (
    choose_reader,
    conversation_examples,
)
from snakechat.data import toy
from snakechat.data.dialogues import parse_prompt
from snakechat.data.reward_model_encoding import ChatEncoder
from snakechat.data.tokenizers import is_same_tokenizer
from snakechat.modeling.forward import Scorer, response_scores
from snakechat.modeling.loading import load_scorer
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from snakechat.workflow.errors import InputError
from support.talking import as_chatml

PROMPTS = list(map(parse_prompt, toy.all_prompts()[:3]))
RESPONSES = [" Hello.", " You are welcome!", " Get a pie at the bakery."]


@pytest.fixture
def saved(tmp_path):
    """A function that saves a tokenizer and returns its folder."""

    def save(name, tokenizer):
        tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


@pytest.fixture
def other_tokenizer():
    rows, _ = toy.make_rows(100, 10, random.Random(1))
    return train_tokenizer((text for row in rows for text in row.values()), 290)


def test_a_reward_model_with_another_vocabulary_or_template_reads_text(
    tokenizer, other_tokenizer, saved
):
    actor, same, other = (
        saved(name, each)
        for name, each in (("actor", tokenizer), ("same", tokenizer), ("other", other_tokenizer))
    )
    reader = choose_reader("reward/mine", same, "dialogue", actor, "dialogue")
    assert reader.encoder is None and reader.shares_tokenizer
    for name in ("reward/mine", "models/mine"):
        reader = choose_reader(name, other, "dialogue", actor, "dialogue")
        assert reader.encoder is not None and not reader.shares_tokenizer
        assert len(reader.tokenizer) == 290
    # With the vocabulary of the actor, it can start a critic.
    folder = saved("both", as_chatml(tokenizer))
    reader = choose_reader("reward/mine", folder, "chat", folder, "dialogue")
    assert reader.encoder is not None and reader.shares_tokenizer


def test_a_classifier_reads_ids_only_if_its_template_ends_as_responses_do(tokenizer, saved):
    # Behind <|im_end|>, ChatML has a line break, at which such a classifier scores.
    chatml = as_chatml(tokenizer)
    folder = saved("both", chatml)
    assert choose_reader("models/a", folder, "chat", folder, "chat").encoder is not None
    assert choose_reader("reward/a", folder, "chat", folder, "chat").encoder is None
    chatml.chat_template = chatml.chat_template.replace(
        "<|im_end|>\n", "<|im_end|>{{ '' if loop.last else '\n' }}"
    ).replace("{%- if add_generation_prompt -%}\n", "{%- if add_generation_prompt -%}\n{{ '\n' }}")
    folder = saved("trimmed", chatml)
    assert choose_reader("models/a", folder, "chat", folder, "chat").encoder is None


@pytest.mark.parametrize("name", ["bos", "eos", "pad"])
def test_tokenizers_with_other_ids_of_bos_and_eos_differ(name, tokenizer):
    other = copy.deepcopy(tokenizer)
    assert is_same_tokenizer(tokenizer, other)
    setattr(other, f"{name}_token", tokenizer.convert_ids_to_tokens(20))
    # No model reads pad.
    assert is_same_tokenizer(tokenizer, other) == (name == "pad")


@pytest.fixture
def classifier(other_tokenizer, tmp_path):
    """A classifier with its own tokenizer and chat template, and its folder."""
    chatml = as_chatml(other_tokenizer)
    save_model(make_causal({**INIT, "init_std": 0.3}, chatml, 1), chatml, tmp_path / "base")
    torch.manual_seed(2)
    model = load_scorer(tmp_path / "base", "fp32", chatml, new_head=True)
    save_model(model, chatml, tmp_path / "classifier")
    return chatml, tmp_path / "classifier"


def test_scores_are_those_of_transformers_on_the_rendered_conversation(classifier):
    tokenizer, folder = classifier
    scorer = Scorer(load_scorer(folder, "fp32", tokenizer)).eval()
    # The last conversation is longer than the positions of the model, and loses its start.
    prompts = [*PROMPTS[:2], [("user", " ".join(f"word {n}" for n in range(100)))]]
    examples = conversation_examples(scorer, ChatEncoder(tokenizer), prompts, RESPONSES)
    [scores] = response_scores(scorer, examples, 200)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for prompt, response, score in zip(prompts, RESPONSES, scores, strict=True):
        [ids] = ChatEncoder(tokenizer)([prompt], [response])
        # As many positions as the model has.
        with torch.no_grad():
            logits = theirs(torch.tensor([ids[-64:]])).logits
        assert logits.item() == pytest.approx(score, abs=1e-5)
    assert np.ptp(scores) > 0.01


def test_a_classifier_without_a_chat_template_is_an_error(tokenizer, saved):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = None
    folder = saved("plain", tokenizer)
    with pytest.raises(InputError, match="plain: the tokenizer has no chat template"):
        choose_reader("models/plain", folder, "chat", folder, "dialogue")
