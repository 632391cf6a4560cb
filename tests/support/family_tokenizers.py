"""Tokenizers built as those of a model family: type, special tokens and chat template, few merges.

The facts are those of tokenizer.json and tokenizer_config.json of the named repository.
"""

import json

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXTS = ["What is the capital of France?", "The capital of France is Paris, on the river Seine."]
TEXTS += ["How do I boil an egg?", "Put it in boiling water for seven minutes.\n\nThen cool it."]
TEXTS += ["为什么天空是蓝色的?", "因为空气散射蓝光。"]
NUM_MERGES = 120


def gpt2():
    """gpt2: one special token behind the others, neither pad token nor chat template."""
    tokenizer = byte_level(last=["<|endoftext|>"])
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    return wrapped(tokenizer, **names)


def pythia():
    """EleutherAI/pythia: bos, eos and unk are one token; <|padding|> exists, but is not pad."""
    tokenizer = byte_level(first=["<|endoftext|>", "<|padding|>"])
    tokenizer.normalizer = normalizers.NFC()
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    return wrapped(tokenizer, **names)


def bloom():
    """bigscience/bloom: four special tokens, none of which starts a text."""
    tokenizer = byte_level(first=["<unk>", "<s>", "</s>", "<pad>"])
    return wrapped(
        tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


MISTRAL_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('roles must alternate user/assistant/user/assistant/...') -}}
  {%- endif -%}
  {%- if message.role == 'user' -%}
    {{- '[INST] ' + message.content + '[/INST]' -}}
  {%- else -%}
    {{- ' ' + message.content + eos_token -}}
  {%- endif -%}
{%- endfor -%}
"""


def mistral():
    """mistralai/Mistral-7B-Instruct-v0.3: [INST] and [/INST] are tokens; no pad token."""
    tokenizer = sentence_piece(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], prefix=True)
    tokenizer.post_processor = starts_with(tokenizer, "<s>")
    return wrapped(
        tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=MISTRAL_TEMPLATE,
    )


CHATML = """\
{%- if messages[0].role != 'system' -%}
  {{- '<|im_start|>system\n' + {SYSTEM} + '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""


def chatml(system):
    """ChatML with a system turn where a conversation has none."""
    return CHATML.replace("{SYSTEM}", repr(system))


def qwen2_5():
    """Qwen/Qwen2.5 (base): eos is pad, while the chat template ends turns with <|im_end|>."""
    tokenizer = byte_level(last=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.normalizer = normalizers.NFC()
    template = chatml("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
    names = dict.fromkeys(("eos_token", "pad_token"), "<|endoftext|>")
    return wrapped(tokenizer, **names, chat_template=template)


def smollm2():
    """HuggingFaceTB/SmolLM2-Instruct: bos starts a turn, eos and pad end it."""
    tokenizer = byte_level(first=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    return wrapped(
        tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=chatml("You are a helpful AI assistant named SmolLM."),
    )


GEMMA_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message.role == 'system' -%}
    {{- raise_exception('System role not supported') -}}
  {%- endif -%}
  {%- set role = 'model' if message.role == 'assistant' else message.role -%}
  {{- '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<start_of_turn>model\n' -}}
{%- endif -%}
"""


def gemma():
    """google/gemma-it: turns end with <end_of_turn>, which is not eos."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = sentence_piece(special, prefix=False)
    tokenizer.post_processor = starts_with(tokenizer, "<bos>")
    return wrapped(
        tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        chat_template=GEMMA_TEMPLATE,
    )


PHI3_TEMPLATE = """\
{%- for message in messages -%}
  {{- '<|' + message.role + '|>\n' + message.content + '<|end|>\n' -}}
{%- endfor -%}
{{- '<|assistant|>\n' if add_generation_prompt else eos_token -}}
"""


def phi3():
    """microsoft/Phi-3-mini-instruct: eos is pad and ends a conversation, <|end|> a turn.

    The special tokens of turns take the white space behind them.
    """
    tokenizer = sentence_piece(["<unk>", "<s>", "</s>"], prefix=True)
    names = ["<|assistant|>", "<|system|>", "<|end|>", "<|user|>"]
    tokens = [AddedToken(name, rstrip=True, normalized=False, special=True) for name in names]
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", normalized=False), *tokens])
    tokenizer.post_processor = starts_with(tokenizer, "<s>")
    return wrapped(
        tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=PHI3_TEMPLATE,
    )


# Types.


def byte_level(first=(), last=()):
    """A byte-level BPE tokenizer. first, last: special tokens before and behind the others."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(first) + len(alphabet) + NUM_MERGES,
        special_tokens=list(first),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(list(last))
    return tokenizer


def sentence_piece(special, prefix):
    """A BPE tokenizer as converted from SentencePiece: spaces are "▁", rare characters bytes.

    prefix: whether a text, and text behind a special token, starts with a space.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=60 + NUM_MERGES, show_progress=False)
    trained.train_from_iterator([text for text in TEXTS if text.isascii()], trainer)
    model = json.loads(trained.to_str())["model"]
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            {name: number for number, name in enumerate(names)},
            [tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    start = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*start, spaces])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] * prefix)])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    return tokenizer


def starts_with(tokenizer, bos):
    """A post-processor that starts a text with bos."""
    return processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


def wrapped(tokenizer, **names):
    """The tokenizer for transformers. names: special tokens, and the chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names
    )
