"""Pad tokens, the ends of turns and the ids that stop sampling."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from snakechat.data.chat_templates import end_of_turn, set_pad_token, stop_ids
from snakechat.data.encoder import Encoder
from snakechat.data.tokenizers import load_tokenizer
from snakechat.workflow.errors import InputError
from support.chat_templates import CHATML
from support.encoding import encode_response


def bare_tokenizer(*special, **names):
    """A byte-level tokenizer without merges, with the given special tokens."""
    backend = Tokenizer(models.BPE({byte: i for i, byte in enumerate(ByteLevel.alphabet())}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def test_tokenizer_without_eos_is_an_error(tmp_path):
    bare_tokenizer("<s>", bos_token="<s>").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no eos token"):
        load_tokenizer(tmp_path)


END = "<|endoftext|>"
# Special tokens, names of some of them, and the pad token.
PADS = {
    "Pythia": ([END, "<|padding|>"], {"bos": END, "eos": END, "unk": END}, "<|padding|>"),
    "Qwen base": ([END, "<|fim_pad|>", "<|video_pad|>"], {"eos": END, "pad": END}, "<|fim_pad|>"),
    # Without a name, the last one.
    "Llama 3": (["<|a|>", END, "<|0|>", "<|1|>"], {"bos": "<|a|>", "eos": END}, "<|1|>"),
    "GPT-2": ([END], {"bos": END, "eos": END, "unk": END}, "ÿ"),
    # A name in words is not padding.
    "Padlock": ([END, "<|padlock|>"], {"eos": END, "bos": "<|padlock|>"}, "ÿ"),
}


@pytest.mark.parametrize("case", PADS)
def test_pad_is_the_best_existing_token_that_ends_no_turn(case, tmp_path):
    special, names, pad = PADS[case]
    tokenizer = bare_tokenizer(*special, **{f"{key}_token": name for key, name in names.items()})
    size = len(tokenizer)
    tokenizer.save_pretrained(tmp_path / "1")
    for number in (1, 2):
        tokenizer = load_tokenizer(tmp_path / str(number))
        assert tokenizer.pad_token == pad
        assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
        assert len(tokenizer) == size
        tokenizer.save_pretrained(saved := tmp_path / str(number + 1))
        # In a word, a byte that serves as pad is text, wherever the tokenizer is used.
        ids = AutoTokenizer.from_pretrained(saved)("Haÿ").input_ids
        assert pad != "ÿ" or tokenizer.pad_token_id not in ids


def test_pad_is_neither_the_end_of_a_turn_nor_written_by_the_template(chat_tokenizer):
    # The candidates are <pad>, <unk>, <|im_start|> and <|im_end|>.
    backend = chat_tokenizer().backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<|im_end|>", unk_token="<|im_start|>"
    )
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "{{ '<|' + 'im_end|>' }}")
    set_pad_token(tokenizer)
    assert tokenizer.pad_token == "<|im_start|>"
    tokenizer.pad_token = tokenizer.unk_token = None
    set_pad_token(tokenizer)
    assert tokenizer.pad_token == "<pad>"


GEMMA_LIKE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ message.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Special tokens, the template, and the token that ends a turn; eos is <eos>. Templates that do not
# write this token do not suit training.
TURNS = {
    "Gemma": (["<start_of_turn>", "<end_of_turn>"], GEMMA_LIKE, "<end_of_turn>"),
    # Their tokens are text to the tokenizer.
    "ChatML without tokens": ([], CHATML, "<eos>"),
    "no dialogues": ([], "{{ raise_exception('no') }}", "<eos>"),
    "no template": ([], None, "<eos>"),
}


@pytest.mark.parametrize("case", TURNS)
def test_a_turn_ends_in_the_first_special_token_that_the_template_writes_after_it(case, tmp_path):
    special, template, end = TURNS[case]
    tokenizer = bare_tokenizer("<bos>", "<eos>", *special, bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = template
    end_id, eos_id = tokenizer.convert_tokens_to_ids([end, "<eos>"])
    assert end_of_turn(tokenizer)[1] == end_id
    expected = [end_id] if end_id == eos_id else [end_id, eos_id]
    assert list(stop_ids(tokenizer, tmp_path)) == expected
    if case == "ChatML without tokens":
        with pytest.raises(InputError, match="the chat template renders a dialogue as"):
            Encoder(tokenizer, "chat")
    elif template and case != "no dialogues":
        response = encode_response(Encoder(tokenizer, "chat"), "Yes.")
        assert response[-1] == end_id
        assert tokenizer.decode(response[:-1]) == "Yes."
    # A dialogue as text ends in eos.
    response = encode_response(Encoder(tokenizer, "dialogue"), " Yes.")
    assert response[-1] == eos_id
    # No token that the template writes is the pad token.
    set_pad_token(tokenizer)
    assert tokenizer.pad_token not in ("<eos>", *special)


def test_the_end_of_a_turn_is_special_also_if_it_was_added_as_text(tmp_path):
    tokenizer = bare_tokenizer("<eos>", eos_token="<eos>")
    tokenizer.add_tokens(["<|im_start|>", AddedToken("<|im_end|>", lstrip=True), "<think>"])
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path)
    expected = tokenizer("a  <|im_end|>\nb").input_ids
    encoder = Encoder(tokenizer := load_tokenizer(tmp_path), "chat")
    # It strips white space as before.
    assert tokenizer("a  <|im_end|>\nb").input_ids == expected
    response = encode_response(encoder, " Yes.")
    assert tokenizer.convert_ids_to_tokens(response) == ["Y", "e", "s", ".", "<|im_end|>"]
    assert tokenizer.decode(response, skip_special_tokens=True) == "Yes."
    assert encoder.has_special_token("a<|im_end|>") and not encoder.has_special_token("<think>")


def test_a_letter_that_serves_as_pad_is_text(tmp_path):
    pad = "ÿ"
    bare_tokenizer(END, bos_token=END, eos_token=END).save_pretrained(tmp_path / "bare")
    tokenizer = bare_tokenizer(END, bos_token=END, eos_token=END, pad_token=pad)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "chat")
    text = f"Haÿ {pad} {pad}{pad} a"
    expected = AutoTokenizer.from_pretrained(tmp_path / "bare").tokenize(text)
    tokenizer = load_tokenizer(tmp_path / "chat")
    assert tokenizer.pad_token == pad
    encoder = Encoder(tokenizer, "chat")
    assert not encoder.has_special_token(text)
    assert encoder.has_special_token(f"a{END}")
    response = encode_response(encoder, text)
    assert tokenizer.convert_ids_to_tokens(response) == [*expected, END]


def test_stop_ids_are_those_of_the_generation_config_too(chat_tokenizer, tmp_path):
    tokenizer = chat_tokenizer()
    end = tokenizer.eos_token_id
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert stop_ids(tokenizer, tmp_path) == (end, 7)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [5, {end}]}}')
    assert stop_ids(tokenizer, tmp_path) == (end, 5)
    (tmp_path / "generation_config.json").write_text("{}")
    assert stop_ids(tokenizer, tmp_path) == (end,)
