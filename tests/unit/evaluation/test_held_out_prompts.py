"""Prompts of an evaluation: their shares of a blend, and training rows with the same prompt."""

from collections import Counter

import numpy as np
import pytest

from snakechat.data.records import open_records
from snakechat.evaluation.held_out_prompts import count_contamination, draw_prompts
from support.dialogues import make_record

EQUAL = {"a": 1.0, "b": 1.0, "c": 1.0}


@pytest.mark.parametrize(
    ("kept_of", "weight", "num_prompts", "expected"),
    [
        # Shares follow the weights of training.
        ({"a": 500, "b": 500}, 3.0, 40, {"a": 30, "b": 10}),
        # A dataset with too few rows gives all of them.
        ({"a": 2, "b": 50}, 100.0, 12, {"a": 2, "b": 10}),
    ],
)
def test_shares(kept_of, weight, num_prompts, expected):
    sample = draw_prompts(kept_of, {"a": weight, "b": 1.0}, num_prompts, seed=1)
    assert Counter(sample.datasets) == expected


def test_a_first_part_of_the_prompts_is_in_proportion_too():
    sample = draw_prompts({"a": 800, "b": 200}, EQUAL, 100, seed=1)
    for length in (5, 10, 50):
        assert sample.datasets[:length].count("b") == length // 5


def test_the_seed_determines_the_draw():
    first, again, other = (draw_prompts({"a": 1000}, EQUAL, 10, seed) for seed in (1, 1, 2))
    assert first == again != other


@pytest.fixture
def inputs(tmp_path):
    """A dataset with four training rows: sft has the first two, reward the last two."""
    records, rows = tmp_path / "records", tmp_path / "rows"
    records.mkdir()
    rows.mkdir()
    with open_records(records / "train.parquet") as write:
        for text in ("What is 2 + 2?", "Who are you?", "Who  are YOU ?!", "Why?"):
            write(make_record(text))
    np.save(rows / "sft.train.npy", np.array([0, 1]))
    np.save(rows / "reward.train.npy", np.array([2, 3]))
    return {"records.a": records, "rows.a": rows}


def test_contamination_of_each_phase(inputs, capsys):
    prompts = ["Who are you?\n", "who are you", "What is 2 * 2?", "Where?"]
    assert count_contamination(prompts, {"a": ["sft", "reward"]}, inputs) == {
        "sft/a": {"exact": 1, "normalized": 2},
        "reward/a": {"exact": 0, "normalized": 2},
    }
    message = capsys.readouterr().err
    assert "2 of 4 evaluation prompts are also training prompts of sft/a" in message
