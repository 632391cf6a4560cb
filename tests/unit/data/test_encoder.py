"""Ids of prompts and responses, and truncation."""

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from snakechat.data.dialogues import chat_template, messages_of, parse_prompt, render_prompt
from snakechat.data.encoder import Encoder
from snakechat.data.tokenizers import load_tokenizer, load_training_tokenizer
from snakechat.workflow.errors import InputError
from support.chat_templates import CHATML
from support.encoding import encode_pair, encode_response

TEXTS = [f"Human: {number}\n\nAssistant: yes {number} no" for number in range(10)]


def is_joint(encoder, prompt, response):
    """Return whether a prompt and its response together have the ids of the whole dialogue.

    The whole dialogue is one text, as transformers renders it: with the response as its last turn,
    or as an earlier one, which some templates render differently.
    """
    start, end = encode_pair(encoder, prompt, response)
    if encoder.template == "dialogue":
        # Text has no token that ends a response.
        end = end[:-1]
        wholes = encoder.prompts([[("unmarked", render_prompt(prompt) + response)]])
    else:
        turns = messages_of([*prompt, ("assistant", response.removeprefix(" "))])
        wholes = [
            encoder.tokenizer.apply_chat_template(each, return_dict=False)
            for each in (turns, [*turns, *messages_of([("user", "Thanks")])])
        ]
    return any(whole[: len(start) + len(end)] == [*start, *end] for whole in wholes)


# --- ids of dialogues -------------------------------------------------------------------------


def test_special_tokens_in_a_dialogue_are_text(trained):
    dialogue, text = Encoder(trained, "dialogue"), "</s><s><pad><unk>"
    prompt, response = encode_pair(dialogue, parse_prompt(text), text)
    # Only bos and eos are special tokens, whose ids are 0 to 3.
    assert prompt == [trained.bos_token_id, *response[:-1]]
    assert min(prompt[1:]) > 3
    assert trained.decode(prompt[1:]) == text
    assert not dialogue.has_special_token(text)


def test_truncation_and_padding_of_tokenizer_json_are_disabled(trained):
    backend = Tokenizer.from_str(trained.backend_tokenizer.to_str())
    backend.enable_truncation(5)
    backend.enable_padding(length=40)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    encoder = Encoder(tokenizer, "dialogue")
    # <s> or </s>, and a token for each letter.
    assert [len(ids) for ids in encoder.prompts(map(parse_prompt, ["Qwertzuio", "Q"]))] == [10, 2]
    assert [len(encode_response(encoder, text)) for text in ("Qwertzuio", "Q")] == [10, 2]


def test_auto_keeps_the_dialogue_format_of_a_model_that_was_trained_with_it(trained, tmp_path):
    trained.save_pretrained(tmp_path / "base")
    first = load_training_tokenizer(tmp_path / "base", "auto")
    assert first.chat_template == chat_template(first)
    first.save_pretrained(tmp_path / "sft")
    found = Encoder(load_training_tokenizer(tmp_path / "sft", "auto"), "auto")
    assert found.template == "dialogue"
    rows = [(parse_prompt(text), [" Yes."]) for text in TEXTS]
    expected = Encoder(trained, "dialogue").conversations(rows)
    assert [*found.conversations(rows)] == [*expected]


# --- prompt and response as one text -----------------------------------------------------------

# As Llama 2's: a space between prompt and response, which the prompt does not have.
LLAMA2_LIKE = (
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{{ bos_token + '[INST] ' + message.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture
def sentence_piece(tmp_path):
    """A tokenizer that puts a space in front of each text, as Llama 2's does."""
    alphabet = sorted({*"".join(TEXTS), *"[INST]/\n.", "▁"})
    pieces = ["<unk>", "<s>", "</s>", *alphabet, "▁y", "▁ye", "▁yes", "]y"]
    merges = [("▁", "y"), ("▁y", "e"), ("▁ye", "s"), ("]", "y")]
    backend = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(tmp_path)
    return load_tokenizer(tmp_path)


def test_a_response_has_no_space_that_the_text_does_not_have(sentence_piece):
    encoder = Encoder(sentence_piece, "dialogue")
    response = encode_response(encoder, " yes")
    assert sentence_piece.convert_ids_to_tokens(response) == ["▁yes", "</s>"]
    # The tokenizer alone puts another space in front.
    assert sentence_piece.tokenize(" yes") == ["▁", "▁yes"]
    assert is_joint(encoder, [("user", "no")], " yes")


def test_a_response_starts_with_the_space_that_the_template_writes(sentence_piece):
    sentence_piece.chat_template = LLAMA2_LIKE
    encoder = Encoder(sentence_piece, "chat")
    response = encode_response(encoder, "yes")
    # And ends with the space in front of </s>.
    assert sentence_piece.convert_ids_to_tokens(response) == ["▁yes", "▁", "</s>"]
    assert encode_response(encoder, "yes ") == response
    assert is_joint(encoder, [("user", "no")], "yes")


@pytest.mark.parametrize(
    ("template", "whole", "ours"),
    [
        # Without the header of a response, and without the end of a turn.
        (
            CHATML.partition("{% if add_generation_prompt %}")[0],
            "<|im_start|>assistant\\nAnswer<|im_end|>",
            "Question<|im_end|>\\nAnswer<|im_end|>'",
        ),
        (CHATML.replace("<|im_end|>", ""), "Answer\\n", "assistant\\nAnswer<|im_end|>'"),
    ],
)
def test_a_template_that_renders_other_dialogues_than_ours_is_an_error(
    chat_tokenizer, template, whole, ours
):
    with pytest.raises(InputError, match="the chat template renders a dialogue as") as error:
        Encoder(chat_tokenizer(template), "chat")
    assert whole in str(error.value) and ours in str(error.value)


def test_prompts_do_not_end_in_a_token_that_the_tokenizer_appends(shared_data):
    plain, appending = (load_tokenizer(shared_data / "tokenizers/llama2") for _ in range(2))
    appending.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", plain.bos_token_id), ("</s>", plain.eos_token_id)],
    )
    assert appending(":").input_ids == [*plain(":").input_ids, plain.eos_token_id]
    turns = list(map(parse_prompt, TEXTS))
    assert Encoder(appending, "dialogue").prompts(turns) == Encoder(plain, "dialogue").prompts(
        turns
    )
    response = encode_response(Encoder(appending, "dialogue"), " Yes.")
    assert response.count(plain.eos_token_id) == 1
    # The model is served with the same ids.
    assert chat_template(appending) == chat_template(plain)


def test_a_response_that_would_share_a_token_with_its_prompt_has_its_own_ids(sentence_piece):
    sentence_piece.chat_template = LLAMA2_LIKE.replace("' ' + message", "message")
    encoder = Encoder(sentence_piece, "chat")
    # "]y" is one token.
    response = encode_response(encoder, "yes")
    assert sentence_piece.convert_ids_to_tokens(response) == ["▁yes", "▁", "</s>"]
    found = [is_joint(encoder, [("user", "no")], response) for response in ("yes", "no")]
    assert found == [False, True]


def test_rows_have_the_ids_of_one_text_with_a_real_tokenizer(shared_data):
    encoder = Encoder(load_tokenizer(shared_data / "tokenizers/qwen3"), "chat")
    for dataset in ("hh_harmless", "dpo_demo_en", "dpo_demo_zh"):
        for row in pq.read_table(shared_data / dataset / "test.parquet").slice(0, 8).to_pylist():
            question = row["prompt"].rpartition("\n\nHuman:")[2]
            assert is_joint(encoder, parse_prompt(f"\n\nHuman:{question}"), row["chosen"])
