"""Tokenizers, and tokens on disk: ragged arrays, opened by memory map.

A ragged array NAME is two files: NAME.ids.npy, all ids one after the other in the smallest unsigned
type that holds the vocabulary, and NAME.offsets.npy, where row i is ids[offsets[i]:offsets[i + 1]].
There is no padding on disk.
"""

import re
from itertools import chain
from pathlib import Path

import numpy as np
from jinja2 import TemplateError
from transformers import AutoTokenizer

from snakechat.data.dialogues import chat_template, parse_turns
from snakechat.workflow.errors import InputError


def load_tokenizer(folder):
    """The tokenizer of a model folder, with an eos and a pad token of its own.

    pad is never eos: where the tokenizer brings no pad, unk takes its place, which is only ever
    masked. Raises InputError where there is no eos, or nothing that could be pad.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise InputError(f"{folder}: the tokenizer has no eos token: responses could not end")
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        if tokenizer.unk_token_id in (None, tokenizer.eos_token_id):
            raise InputError(f"{folder}: the tokenizer has no pad token apart from eos: add one")
        tokenizer.pad_token = tokenizer.unk_token
    return tokenizer


def load_training_tokenizer(folder, template):
    """The tokenizer of a model that is trained, whose chat template is what it is trained with.

    With template chat that is the one which the tokenizer brings.
    """
    tokenizer = load_tokenizer(folder)
    if template == "dialogue":
        tokenizer.chat_template = chat_template(tokenizer)
    return tokenizer


class Encoder:
    """Ids of prompts and responses, by the tokenizers library itself; safe to call from threads.

    template: "dialogue" takes a prompt's text as it is, Human: and Assistant:; "chat" puts its
    turns into the tokenizer's own chat template. Raises InputError where the tokenizer has none,
    or is not one of the tokenizers library.
    """

    def __init__(self, tokenizer, template):
        self.tokenizer, self.template = tokenizer, template
        if not tokenizer.is_fast:
            raise InputError("the tokenizer has no tokenizer.json: convert it to a fast one")
        if template == "chat" and not tokenizer.chat_template:
            raise InputError("template is chat, and the tokenizer has no chat template of its own")
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_padding()
        self.backend.no_truncation()
        # "</s>" in somebody's text is text and ends no response; in a chat template it is a token.
        self.backend.encode_special_tokens = template == "dialogue"
        added = self.backend.get_added_tokens_decoder().values()
        special = {str(token.content) for token in added if token.special}
        special |= set(tokenizer.all_special_tokens)
        self.special = re.compile("|".join(map(re.escape, sorted(special))))

    def prompts(self, texts):
        """Lists of ids, with whatever the tokenizer or its template puts in front (bos)."""
        if self.template == "chat":
            return self._ids([self._chat(text) for text in texts], add_special_tokens=False)
        return self._ids(texts, add_special_tokens=True)

    def responses(self, texts):
        """Lists of ids, each closed by eos: the same eos in every phase."""
        if self.template == "chat":
            texts = [text.strip() for text in texts]
        eos = self.tokenizer.eos_token_id
        return [[*ids, eos] for ids in self._ids(texts, add_special_tokens=False)]

    def is_unsafe(self, text):
        """Whether a text would turn into special tokens, which only a chat template may write."""
        return self.template == "chat" and self.special.search(text) is not None

    def _chat(self, prompt):
        messages = [{"role": role, "content": text} for role, text in parse_turns(prompt)]
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            reason = " ".join(str(error).split())
            raise InputError(f"the chat template refuses turns of {roles}: {reason}") from None

    def _ids(self, texts, add_special_tokens):
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encoded]


def truncate_prompt(tokenizer, prompt, responses, limit):
    """Make room for the longer response: a prompt loses its start, but not its bos.

    A response that is too long by itself is cut at its end. One token of the prompt stays at least:
    the first token of a response needs one before it. Returns prompt, responses.
    """
    responses = [ids[: limit - 1] for ids in responses]
    room = limit - max(map(len, responses))
    if len(prompt) > room > 1 and prompt[0] == tokenizer.bos_token_id:
        return [prompt[0], *prompt[len(prompt) - room + 1 :]], responses
    return prompt[-room:], responses


def truncate_responses(prompt, responses, limit):
    """Cut at the end, as DeepSpeed-Chat does: a long prompt takes all the room of its responses."""
    prompt = prompt[:limit]
    return prompt, [ids[: limit - len(prompt)] for ids in responses]


class RaggedWriter:
    """Writes a ragged array some rows after the other; a context manager."""

    def __init__(self, folder, name, vocab_size):
        self.paths = [Path(folder, f"{name}.{what}.npy") for what in ("ids", "offsets")]
        self.dtypes = [np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32), np.dtype("i8")]
        self.lengths = [0, 0]

    def __enter__(self):
        self.files = [path.open("wb") for path in self.paths]
        self._write_headers()
        self._append(1, np.zeros(1, np.int64))
        return self

    def __exit__(self, *_):
        # numpy leaves room in a header for any number of digits.
        self._write_headers()
        for file in self.files:
            file.close()

    def _write_headers(self):
        for file, dtype, length in zip(self.files, self.dtypes, self.lengths, strict=True):
            about = {"descr": dtype.str, "fortran_order": False, "shape": (length,)}
            file.seek(0)
            np.lib.format.write_array_header_1_0(file, about)

    def _append(self, which, values):
        # Not tofile, whose error at a full disk does not say so.
        self.files[which].write(values.data)
        self.lengths[which] += len(values)

    def write(self, rows):
        """rows: lists of ids."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        self._append(1, self.lengths[0] + np.cumsum(lengths))
        ids = chain.from_iterable(rows)
        self._append(0, np.fromiter(ids, self.dtypes[0], int(lengths.sum())))


class Ragged:
    """A ragged array on disk; array[i] is the ids of row i (numpy, a view of the file)."""

    def __init__(self, folder, name):
        self.ids = np.load(Path(folder, f"{name}.ids.npy"), mmap_mode="r", allow_pickle=False)
        self.offsets = np.load(
            Path(folder, f"{name}.offsets.npy"), mmap_mode="r", allow_pickle=False
        )

    def __len__(self):
        return len(self.offsets) - 1

    def __getitem__(self, row):
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    def write_first(self, rows, folder, name):
        """Write the first rows, or all if there are fewer, as an array of their own."""
        offsets = self.offsets[: rows + 1]
        np.save(Path(folder, f"{name}.offsets.npy"), offsets)
        np.save(Path(folder, f"{name}.ids.npy"), self.ids[: offsets[-1]])

    @property
    def lengths(self):
        """Length of each row."""
        return np.diff(self.offsets)
