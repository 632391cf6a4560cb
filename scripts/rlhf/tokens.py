"""Tokenizers, and tokens on disk: ragged arrays, opened by memory map.

A ragged array NAME is two files: NAME.ids.npy, all ids one after the other in the smallest unsigned
type that holds the vocabulary, and NAME.offsets.npy, where row i is ids[offsets[i]:offsets[i + 1]].
There is no padding on disk.
"""

import json
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from rlhf.job import InputError
from rlhf.records import read_records


def load_tokenizer(folder):
    """The tokenizer of a model folder, with an eos and a pad token of its own.

    pad is never eos: where the tokenizer brings no pad, unk takes its place, which is only ever
    masked. Raises InputError where there is no eos, or nothing that could be pad.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise InputError(f"{folder}: the tokenizer has no eos token: answers could not end")
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        if tokenizer.unk_token_id in (None, tokenizer.eos_token_id):
            raise InputError(f"{folder}: the tokenizer has no pad token apart from eos: add one")
        tokenizer.pad_token = tokenizer.unk_token
    return tokenizer


def prompt_ids(tokenizer, texts):
    """Ids of prompts, with whatever the tokenizer puts in front (bos)."""
    return _ids(tokenizer, texts, add_special_tokens=True)


def response_ids(tokenizer, texts):
    """Ids of responses, each closed by eos: the same eos in every phase."""
    ids = _ids(tokenizer, texts, add_special_tokens=False)
    return [[*row, tokenizer.eos_token_id] for row in ids]


def _ids(tokenizer, texts, add_special_tokens):
    if not texts:
        return []
    return tokenizer(
        texts,
        add_special_tokens=add_special_tokens,
        # "</s>" in somebody's text is text: it ends no answer.
        split_special_tokens=True,
        return_attention_mask=False,
    )["input_ids"]


def end_of_prompt(tokenizer, ids, room):
    """The last ids of a prompt that fit into room, behind its bos if it begins with one."""
    if len(ids) > room > 1 and ids[0] == tokenizer.bos_token_id:
        return [ids[0], *ids[len(ids) - room + 1 :]]
    return ids[-room:]


def phase_records(job, phase, part):
    """Records of a recipe's datasets that belong to a phase, dataset after dataset."""
    rows = []
    for dataset in job.settings.datasets:
        numbers = np.load(job.inputs[f"rows.{dataset}"] / f"{phase}.{part}.npy")
        rows += read_records(job.inputs[f"records.{dataset}"] / f"{part}.parquet", numbers)
    return rows


def is_blank(text):
    return not text.strip()


def write_ragged(folder, name, rows, vocab_size):
    """Write lists of ids as a ragged array."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    ids = np.fromiter((id for row in rows for id in row), dtype=dtype, count=offsets[-1])
    np.save(Path(folder, f"{name}.ids.npy"), ids)
    np.save(Path(folder, f"{name}.offsets.npy"), offsets)


class Ragged:
    """A ragged array on disk; array[i] is the ids of row i (numpy, a view of the file)."""

    def __init__(self, folder, name):
        self.ids = np.load(Path(folder, f"{name}.ids.npy"), mmap_mode="r", allow_pickle=False)
        self.offsets = np.load(Path(folder, f"{name}.offsets.npy"), allow_pickle=False)

    def __len__(self):
        return len(self.offsets) - 1

    def __getitem__(self, row):
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self):
        """Length of each row."""
        return np.diff(self.offsets)


def write_phase(job, phase, encode, vocab_size):
    """Tokenize a phase's parts into job.result; stats.json counts rows kept and dropped.

    encode: a function of records that returns {field: lists of ids} and {reason: dropped rows}.
    Raises InputError where a part has no rows.
    """
    stats = {}
    for part in ("train", "eval"):
        records = phase_records(job, phase, part)
        fields, dropped = encode(records)
        kept = len(next(iter(fields.values())))
        stats[part] = {"rows": kept, "dropped": dropped}
        stats[part] |= {f"{name}_tokens": sum(map(len, rows)) for name, rows in fields.items()}
        if not kept:
            datasets = ", ".join(job.settings.datasets)
            raise InputError(
                f"no row of {datasets} is left to {part} phase {phase}"
                f" ({len(records)} rows, dropped: {dropped})"
            )
        for name, rows in fields.items():
            write_ragged(job.result, f"{part}.{name}", rows, vocab_size)
        print(f"{part}: {kept} rows, dropped {dropped}")
    (job.result / "stats.json").write_text(json.dumps(stats, indent=1, sort_keys=True) + "\n")
