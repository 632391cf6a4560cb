"""Reward models: whether they read ids or text, and their scores of conversations."""

import copy

import pytest

from conftest import INIT
from snakechat.algorithms.reward_models import chat_encoder, choose_encoder, conversation_examples
from snakechat.data.tokenizers import is_same_tokenizer
from snakechat.modeling.forward import Scorer
from snakechat.modeling.models import make_causal
from support.family_tokenizers import toy
from support.talking import as_chatml


def test_a_reward_model_with_another_vocabulary_or_template_reads_text(tokenizer):
    assert choose_encoder(tokenizer, False, "dialogue", tokenizer, "dialogue") == (None, True)
    for is_foreign in (False, True):
        encoder, shared = choose_encoder(toy(290), is_foreign, "dialogue", tokenizer, "dialogue")
        assert encoder and not shared
    # With the vocabulary of the actor, it can start a critic.
    both = as_chatml(tokenizer)
    encoder, shared = choose_encoder(both, False, "chat", both, "dialogue")
    assert encoder and shared


def test_a_classifier_reads_ids_only_if_its_template_ends_as_responses_do(tokenizer):
    # Behind <|im_end|>, ChatML has a line break, at which such a classifier scores.
    chatml = as_chatml(tokenizer)
    assert choose_encoder(chatml, True, "chat", chatml, "chat")[0]
    assert choose_encoder(chatml, False, "chat", chatml, "chat") == (None, True)
    chatml.chat_template = chatml.chat_template.replace(
        "<|im_end|>\n", "<|im_end|>{{ '' if loop.last else '\n' }}"
    ).replace("{% if add_generation_prompt %}", "{% if add_generation_prompt %}{{ '\n' }}")
    assert choose_encoder(chatml, True, "chat", chatml, "chat") == (None, True)


@pytest.mark.parametrize("name", ["bos", "eos", "pad"])
def test_tokenizers_with_other_ids_of_bos_and_eos_differ(name, tokenizer):
    other = copy.deepcopy(tokenizer)
    assert is_same_tokenizer(tokenizer, other)
    setattr(other, f"{name}_token", tokenizer.convert_ids_to_tokens(20))
    # No model reads pad.
    assert is_same_tokenizer(tokenizer, other) == (name == "pad")


def test_a_conversation_that_exceeds_the_positions_loses_its_start(tokenizer):
    scorer = Scorer(make_causal(INIT, tokenizer, 1))
    encoder = chat_encoder(as_chatml(tokenizer))
    long = [("user", " ".join(f"word {n}" for n in range(100)))]
    conversations = [[("user", "Hi.")], long], [" Hello.", " You are welcome!"]
    examples = conversation_examples(scorer, encoder, *conversations)
    for row, ids in enumerate(encoder(*conversations)):
        # As many positions as the model has, of which the last one is scored.
        assert list(examples.prompts[row]) == ids[-64:-1]
        assert list(examples.responses[0][row]) == ids[-1:]
