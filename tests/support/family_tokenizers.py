"""Tokenizers as model families build them: type, special tokens, chat template, few merges.

The facts come from tokenizer.json and tokenizer_config.json of the named repository.
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

from init_model import train_tokenizer
from snakechat.data.toy import make_rows

TEXTS = ["What is the capital of France?", "The capital of France is Paris, on the river Seine."]
TEXTS += ["How do I boil an egg?", "Put it in boiling water for seven minutes.\n\nThen cool it."]
TEXTS += ["为什么天空是蓝色的?", "因为空气散射蓝光。"]
NUM_MERGES = 120
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
QWEN_TEMPLATE = """\
{%- if messages[0].role != 'system' -%}
  {{- '<|im_start|>system\n' -}}
  {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""


def toy(size=300):
    """A tokenizer of so many tokens, trained on the toy dataset."""
    rows, _ = make_rows(100, 10, 1)
    return train_tokenizer((text for row in rows for text in row.values()), size)


def gpt2():
    """gpt2: one special token behind the others, neither pad token nor chat template."""
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    return wrapped(byte_level("<|endoftext|>"), **names)


def qwen2_5():
    """Qwen/Qwen2.5 (base): eos is pad, while the chat template ends turns with <|im_end|>."""
    tokenizer = byte_level("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.normalizer = normalizers.NFC()
    names = dict.fromkeys(("eos_token", "pad_token"), "<|endoftext|>")
    return wrapped(tokenizer, **names, chat_template=QWEN_TEMPLATE)


def byte_level(*special):
    """A byte-level BPE tokenizer with special tokens behind the others."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + NUM_MERGES, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def mistral():
    """mistralai/Mistral-7B-Instruct-v0.3: [INST] and [/INST] are tokens; no pad token.

    As converted from SentencePiece: spaces are "▁", rare characters bytes, and a text, also behind
    a special token, starts with a space.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=60 + NUM_MERGES, show_progress=False)
    trained.train_from_iterator([text for text in TEXTS if text.isascii()], trainer)
    model = json.loads(trained.to_str())["model"]
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
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
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return wrapped(tokenizer, **names, chat_template=MISTRAL_TEMPLATE)


def wrapped(tokenizer, **names):
    """The tokenizer for transformers. names: special tokens, and the chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names
    )
