"""Tokenizers as their files say, and which ones are the same."""

import json
import subprocess
import sys

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from conftest import ROOT
from snakechat.algorithms.rewards import conversation_encoder
from snakechat.data.encoder import Encoder
from snakechat.data.tokenizers import is_same_tokenizer, load_tokenizer
from support import family_tokenizers
from support.chat_templates import CHATML

TEXT = "the Year 2023, é 'tis  fine\n\nEgg</s> x"


def changed(**parts):
    """The backend of a byte-level tokenizer with other parts."""
    backend = family_tokenizers.byte_level("<s>", "</s>")
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def with_bos():
    return processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 376)])


def with_stripping_token():
    backend = family_tokenizers.byte_level("<s>")
    backend.add_tokens([AddedToken("</s>", rstrip=True, normalized=False)])
    return backend


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES])
BACKENDS = {
    "digits": lambda: changed(pre_tokenizer=DIGITS),
    "prefix space": lambda: changed(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "normalizer": lambda: changed(normalizer=normalizers.Lowercase()),
    "post-processor": lambda: changed(post_processor=with_bos()),
    "decoder": lambda: changed(decoder=decoders.Sequence([decoders.ByteLevel()])),
    "added token": with_stripping_token,
    "plain": changed,
}
# Classes of transformers with parts of their own, named in tokenizer_config.json or by model_type.
CLASSES = ["GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer", None]


def write_folder(folder, backend, name, model_type):
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "unk_token": "</s>"} | (
        {"tokenizer_class": name} if name else {}
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("case", BACKENDS)
def test_a_tokenizer_is_that_of_its_file_whatever_its_class(case, name, model_type, tmp_path):
    own = BACKENDS[case]()
    folder = write_folder(tmp_path / "source", own, name, model_type)
    tokenizer = load_tokenizer(folder)
    tokenizer.save_pretrained(folder)
    saved = load_tokenizer(folder)
    for each in (tokenizer, saved):
        ids = each(TEXT).input_ids
        assert ids == own.encode(TEXT).ids
        assert each.decode(ids) == own.decode(ids, skip_special_tokens=False)
        assert each.eos_token == "</s>"
        # No token that the class has and the file has not.
        assert len(each) == own.get_vocab_size()
    if case != "plain" and model_type != "qwen2":
        assert AutoTokenizer.from_pretrained(folder)(TEXT).input_ids == ids


def test_tokens_that_the_files_of_a_tokenizer_name_are_added(tmp_path):
    folder = write_folder(tmp_path / "a", changed(pre_tokenizer=DIGITS), "GPT2Tokenizer", "llama")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"pad_token": "<pad>", "additional_special_tokens": ["<tool>"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.tokenize("20<tool><pad>") == ["2", "0", "<tool>", "<pad>"]
    assert tokenizer.pad_token == "<pad>"


def test_names_that_only_the_class_has_are_kept(tmp_path):
    backend = family_tokenizers.byte_level("<|endoftext|>")
    backend.pre_tokenizer = DIGITS
    folder = write_folder(tmp_path / "gpt2", backend, None, "gpt2")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    tokenizer = load_tokenizer(folder)
    assert tokenizer.tokenize("20") == ["2", "0"]
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"


def named(backend):
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def with_other_merges():
    state = json.loads(changed().to_str())
    state["model"]["merges"].reverse()
    return Tokenizer.from_str(json.dumps(state))


@pytest.mark.parametrize(
    "make", [with_other_merges, *(make for case, make in BACKENDS.items() if case != "plain")]
)
def test_tokenizers_that_differ_in_any_part_are_not_the_same(make):
    plain, other = named(changed()), named(make())
    assert plain.get_vocab() == other.get_vocab()
    assert not is_same_tokenizer(plain, other)


def test_pad_and_chat_template_do_not_matter_but_bos_and_eos_do():
    # An empty sequence of normalizers changes nothing either.
    first, *others = (named(changed(normalizer=normalizers.Sequence([]))) for _ in range(3))
    first.chat_template, first.pad_token = CHATML, "<s>"
    for name, other in zip(("bos_token", "eos_token"), others, strict=True):
        assert is_same_tokenizer(first, other)
        setattr(other, name, first.convert_ids_to_tokens(20))
        assert not is_same_tokenizer(first, other)


def test_a_tokenizer_of_a_result_is_read_without_torch(tmp_path):
    loaded = load_tokenizer(write_folder(tmp_path / "a", changed(), None, "llama"))
    loaded.save_pretrained(tmp_path / "result")
    again = load_tokenizer(tmp_path / "result", is_result=True)
    assert is_same_tokenizer(loaded, again)
    assert loaded.special_tokens_map == again.special_tokens_map
    program = (
        "import sys; from snakechat.data.tokenizers import load_tokenizer;"
        " load_tokenizer(sys.argv[1], is_result=True); sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, tmp_path / "result"]
    subprocess.run(command, cwd=ROOT / "scripts", check=True)


def test_a_text_has_the_same_ids_each_time_whatever_dropout_the_file_has(tmp_path):
    state = json.loads(changed().to_str())
    state["model"]["dropout"] = 0.5
    folder = write_folder(tmp_path / "a", Tokenizer.from_str(json.dumps(state)), None, "llama")
    encoder = Encoder(load_tokenizer(folder), "dialogue")
    text = [("user", "the characterization of the year")]
    assert encoder.prompts([text] * 20) == encoder.prompts([text]) * 20


def test_a_special_token_that_a_normalizer_makes_of_a_text_is_found(tmp_path):
    backend = changed(
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    )
    backend.add_special_tokens([AddedToken("[END]", normalized=True)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="</s>",
        chat_template="{% for turn in messages %}{{ turn.content }}{{ eos_token }}{% endfor %}",
    )
    end = tokenizer.convert_tokens_to_ids("[END]")
    encoder = Encoder(tokenizer, "chat")
    for text in ("a [end] b", "a \N{FULLWIDTH LEFT SQUARE BRACKET}END] b"):
        assert end in tokenizer(text).input_ids
        assert encoder.has_special_token(text)
        [ids] = conversation_encoder(tokenizer, "chat", True)([[("user", text)]], ["b"])
        assert end not in ids
    assert not encoder.has_special_token("a end b")
    # Before the normalization alone.
    assert not encoder.has_special_token("a </S> b") and encoder.has_special_token("a </s> b")
