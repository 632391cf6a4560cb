"""Tokenizers in GGUF files: tokens, scores, merges and special tokens.

llama.cpp tokenizes by code of its own. It has two algorithms for what models here use: byte-level
BPE, whose pre-tokenizers have names, and SentencePiece, which merges by the scores of tokens.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gguf import GGUFWriter, TokenType
from transformers import PreTrainedTokenizerBase

from snakechat.data.special_tokens import USER, end_of_turn_id, render_chat
from snakechat.workflow.errors import InputError

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Of GPT-2; the name of a step that splits off each digit.
BYTE_LEVEL, DIGITS = "byte-level", "digits"
# The steps that split a text, by llama.cpp's name for them.
PRE_TOKENIZERS = {
    (BYTE_LEVEL,): "gpt-2",
    (DIGITS, BYTE_LEVEL): "smollm",
    ("|".join((CONTRACTIONS, WORDS, r"\p{N}{1,3}", OTHERS, SPACES)),): "llama-bpe",
    ("|".join((CONTRACTIONS, WORDS, r"\p{N}", OTHERS, SPACES)),): "qwen2",
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
        "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ): "deepseek-v3",
}
# llama.cpp takes a token that is a whole word without merging in this one.
WHOLE_WORDS = "llama-bpe"
BYTE = re.compile("<0x[0-9A-F]{2}>")


def write_vocabulary(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
    """Write the tokenizer of a model, with its chat template.

    Args:
        size: Rows of the model's embeddings. Those without a token get an unused one.

    Raises:
        InputError: llama.cpp has no such tokenizer.
    """
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    model = description["model"]
    if model["type"] != "BPE":
        raise unsupported(tokenizer, f"the model {model['type']}")
    tokens, types = _tokens(tokenizer, size)
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(_starts_with_space(tokenizer, description))
        writer.add_token_scores(_scores(tokens, merges))
        types = _sentence_piece_types(tokens, types, tokenizer.unk_token_id)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_tokenizer(tokenizer, description))
        writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    _write_special_tokens(writer, tokenizer)


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the server has to prepend bos to a prompt.

    It does if the tokenizer does and the chat template, by which the model was trained, writes it.
    A server removes bos from the text that the template writes.
    """
    ids = tokenizer("").input_ids
    prompt = render_chat(tokenizer, [("user", USER)], prompt=True) or ""
    return bool(
        tokenizer.bos_token
        and ids[:1] == [tokenizer.bos_token_id]
        and prompt.startswith(tokenizer.bos_token)
    )


def unsupported(tokenizer: PreTrainedTokenizerBase, what: str) -> InputError:
    """Return the error of a tokenizer that llama.cpp does not have."""
    return InputError(
        f"{tokenizer.name_or_path}: the tokenizer has {what}, which the export to GGUF does not"
        " support: it knows byte-level BPE as in GPT-2, Llama 3, Qwen, SmolLM and DeepSeek, and"
        " SentencePiece's BPE"
    )


def _tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> tuple[list[str], list[int]]:
    """Return the text and the type of each token."""
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [TokenType.UNUSED] * size
    for text, number in tokenizer.get_vocab().items():
        tokens[number], types[number] = text, TokenType.NORMAL
    for number, added in tokenizer.added_tokens_decoder.items():
        # The byte that serves as pad is a token of the text, too (special_tokens.set_pad_token).
        if not added.single_word:
            types[number] = TokenType.CONTROL if added.special else TokenType.USER_DEFINED
    return tokens, list(map(int, types))


def _sentence_piece_types(tokens: list[str], types: list[int], unknown: int | None) -> list[int]:
    """Return the types of tokens of SentencePiece, which also has bytes and the unknown token."""
    result = [
        int(TokenType.BYTE) if BYTE.fullmatch(token) else kind
        for token, kind in zip(tokens, types, strict=True)
    ]
    if unknown is not None:
        result[unknown] = int(TokenType.UNKNOWN)
    return result


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """Return scores by which llama.cpp merges in the order of the merges: the first one first."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _starts_with_space(tokenizer: PreTrainedTokenizerBase, description: Mapping[str, Any]) -> bool:
    """Return whether text behind a special token gets a space in front.

    Args:
        description: The tokenizer's tokenizer.json.

    Raises:
        InputError: The tokenizer changes texts in another way.
    """
    for step in (*_steps(description["normalizer"]), *_steps(description["pre_tokenizer"])):
        match step:
            case {"type": "Prepend", "prepend": "\u2581"}:
                pass
            case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
                pass
            case {"type": "Metaspace", "replacement": "\u2581", "split": False}:
                pass
            # An earlier step has replaced all spaces.
            case {"type": "Split", "pattern": {"String": " "}}:
                pass
            case _:
                raise unsupported(tokenizer, f"the step {step['type']}")
    special = str(tokenizer.bos_token or tokenizer.eos_token)
    encoded = tokenizer.backend_tokenizer.encode(f"{special}{USER}", add_special_tokens=False)
    return bool(encoded.tokens[1].startswith("\u2581"))


def _pre_tokenizer(tokenizer: PreTrainedTokenizerBase, description: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the pre-tokenizer in a description.

    Raises:
        InputError: It has none.
    """
    for step in _steps(description["normalizer"]):
        # llama.cpp does not apply NFC: almost all texts are in this form already.
        if step["type"] != "NFC":
            raise unsupported(tokenizer, f"the normalizer {step['type']}")
    splits: list[str] = []
    for step in _steps(description["pre_tokenizer"]):
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}:
                splits += [BYTE_LEVEL] if use_regex else []
            case {"type": "Digits", "individual_digits": True}:
                splits.append(DIGITS)
            case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}:
                splits.append(regex)
            case _:
                raise unsupported(tokenizer, f"the pre-tokenizer {step['type']}")
    name = PRE_TOKENIZERS.get(tuple(splits))
    whole_words = bool(description["model"].get("ignore_merges"))
    if name is None or whole_words != (name == WHOLE_WORDS):
        raise unsupported(tokenizer, "another pre-tokenizer")
    return name


def _steps(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or a pre-tokenizer."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for step in part.get("normalizers", part.get("pretokenizers", ())):
        yield from _steps(step)


def _write_special_tokens(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the ids of special tokens, and the chat template."""
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_eot_token_id(end_of_turn_id(tokenizer))
    writer.add_pad_token_id(tokenizer.pad_token_id)
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.unk_token_id is not None:
        writer.add_unk_token_id(tokenizer.unk_token_id)
    writer.add_add_bos_token(adds_bos(tokenizer))
    writer.add_add_eos_token(False)
    writer.add_chat_template(tokenizer.get_chat_template())
