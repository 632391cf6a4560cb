"""Reward models: whether they read ids or text, and their scores of conversations."""

import copy

import pytest

from conftest import INIT
from snakechat.algorithms.reward_models import ChatEncoder, choose_reader, conversation_examples
from snakechat.data.tokenizers import is_same_tokenizer
from snakechat.modeling.forward import Scorer
from snakechat.modeling.models import make_causal
from snakechat.workflow.errors import InputError
from support.family_tokenizers import toy
from support.talking import as_chatml


@pytest.fixture
def saved(tmp_path):
    """A function that saves a tokenizer and returns its folder."""

    def save(name, tokenizer):
        tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


def test_a_reward_model_with_another_vocabulary_or_template_reads_text(tokenizer, saved):
    actor, same, other = (
        saved(name, each)
        for name, each in (("actor", tokenizer), ("same", tokenizer), ("other", toy(290)))
    )
    reader = choose_reader(False, same, "dialogue", actor, "dialogue")
    assert reader.encoder is None and reader.shares_tokenizer
    for is_foreign in (False, True):
        reader = choose_reader(is_foreign, other, "dialogue", actor, "dialogue")
        assert reader.encoder is not None and not reader.shares_tokenizer
        assert len(reader.tokenizer) == 290
    # With the vocabulary of the actor, it can start a critic.
    folder = saved("both", as_chatml(tokenizer))
    reader = choose_reader(False, folder, "chat", folder, "dialogue")
    assert reader.encoder is not None and reader.shares_tokenizer


def test_a_classifier_reads_ids_only_if_its_template_ends_as_responses_do(tokenizer, saved):
    # Behind <|im_end|>, ChatML has a line break, at which such a classifier scores.
    chatml = as_chatml(tokenizer)
    folder = saved("both", chatml)
    assert choose_reader(True, folder, "chat", folder, "chat").encoder is not None
    assert choose_reader(False, folder, "chat", folder, "chat").encoder is None
    chatml.chat_template = chatml.chat_template.replace(
        "<|im_end|>\n", "<|im_end|>{{ '' if loop.last else '\n' }}"
    ).replace("{% if add_generation_prompt %}", "{% if add_generation_prompt %}{{ '\n' }}")
    folder = saved("trimmed", chatml)
    assert choose_reader(True, folder, "chat", folder, "chat").encoder is None


@pytest.mark.parametrize("name", ["bos", "eos", "pad"])
def test_tokenizers_with_other_ids_of_bos_and_eos_differ(name, tokenizer):
    other = copy.deepcopy(tokenizer)
    assert is_same_tokenizer(tokenizer, other)
    setattr(other, f"{name}_token", tokenizer.convert_ids_to_tokens(20))
    # No model reads pad.
    assert is_same_tokenizer(tokenizer, other) == (name == "pad")


def test_a_conversation_that_exceeds_the_positions_loses_its_start(tokenizer):
    scorer = Scorer(make_causal(INIT, tokenizer, 1))
    encoder = ChatEncoder(as_chatml(tokenizer))
    long = [("user", " ".join(f"word {n}" for n in range(100)))]
    conversations = [[("user", "Hi.")], long], [" Hello.", " You are welcome!"]
    examples = conversation_examples(scorer, encoder, *conversations)
    for row, ids in enumerate(encoder(*conversations)):
        # As many positions as the model has, of which the last one is scored.
        assert list(examples.prompts[row]) == ids[-64:-1]
        assert list(examples.responses[0][row]) == ids[-1:]


def test_a_classifier_without_a_chat_template_is_an_error(tokenizer, saved):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = None
    folder = saved("plain", tokenizer)
    with pytest.raises(InputError, match="plain: the tokenizer has no chat template"):
        choose_reader(True, folder, "chat", folder, "dialogue")
