"""What the three tokenize programs make of a phase's rows."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import tokenize_reward
import tokenize_rlhf
import tokenize_sft
from init_model import train_tokenizer
from rlhf.records import write_records
from rlhf.tokens import Ragged, load_tokenizer

ROWS = [
    {"prompt": "Is it far?", "chosen": " No.", "rejected": " Yes, very."},
    {"prompt": "A question that is much too long for the limit", "chosen": " No.", "rejected": "?"},
    {"prompt": "Is it?", "chosen": " ", "rejected": " Yes."},
    {"prompt": " ", "chosen": " No.", "rejected": " Yes."},
    {"prompt": "Is it so?", "chosen": " Same.", "rejected": " Same."},
    {"prompt": "Is it?", "chosen": " An answer without end, on and on.", "rejected": " Yes."},
]


@pytest.fixture
def tokenize(tmp_path):
    """A function that runs a tokenize program on ROWS; returns its folder, tokenizer and stats."""
    train_tokenizer([], 260).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "records").mkdir()
    (tmp_path / "rows").mkdir()

    def run(program, phase, **settings):
        for part in ("train", "eval"):
            write_records(tmp_path / f"records/{part}.parquet", ROWS)
            np.save(tmp_path / f"rows/{phase}.{part}.npy", np.arange(len(ROWS)))
        result = tmp_path / phase
        result.mkdir()
        inputs = {"tokenizer": tmp_path / "tokenizer"}
        inputs |= {"records.mine": tmp_path / "records", "rows.mine": tmp_path / "rows"}
        settings = SimpleNamespace(datasets=["mine"], **settings)
        program.main(SimpleNamespace(result=result, inputs=inputs, settings=settings))
        stats = json.loads((result / "stats.json").read_text())
        return result, load_tokenizer(tmp_path / "tokenizer"), stats["train"]

    return run


def texts(folder, name, tokenizer):
    ragged = Ragged(folder, f"train.{name}")
    return [tokenizer.decode(ragged[row]) for row in range(len(ragged))]


# The tokenizer has a token for each byte: 24 tokens are <s>, 22 letters and </s>.
def test_sft_keeps_answers_and_cuts_the_start_of_prompts(tokenize):
    folder, tokenizer, stats = tokenize(tokenize_sft, "sft", max_length=24)
    assert stats["rows"] == 4
    assert stats["dropped"] == {"empty prompt": 1, "empty answer": 1}
    assert texts(folder, "chosen", tokenizer) == [
        " No.</s>",
        " No.</s>",
        " Same.</s>",
        # An answer over the limit is cut itself, and does not end.
        " An answer without end,",
    ]
    assert texts(folder, "prompt", tokenizer) == [
        "<s>Is it far?",
        # bos stays in front of what is left: 1 + 18 + 5 = 24 tokens.
        "<s>long for the limit",
        "<s>Is it so?",
        "?",
    ]


def test_reward_pairs_share_their_prompt(tokenize):
    folder, tokenizer, stats = tokenize(tokenize_reward, "reward", max_length=24)
    assert stats["rows"] == 3
    assert stats["dropped"] == {"empty prompt": 1, "empty answer": 1, "equal answers": 1}
    assert texts(folder, "prompt", tokenizer)[:2] == ["<s>Is it far?", "<s>long for the limit"]
    assert texts(folder, "rejected", tokenizer) == [" Yes, very.</s>", "?</s>", " Yes.</s>"]


def test_rlhf_leaves_out_long_prompts(tokenize):
    folder, tokenizer, stats = tokenize(tokenize_rlhf, "rlhf", max_prompt_length=12)
    assert stats["dropped"] == {"empty prompt": 1, "prompt too long": 1}
    assert texts(folder, "prompt", tokenizer)[0] == "<s>Is it far?"
    assert stats["rows"] == 4
