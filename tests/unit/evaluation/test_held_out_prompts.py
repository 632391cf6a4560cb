"""Prompts of an evaluation: their shares of a blend, and training rows with the same prompt."""

import json
from collections import Counter

import numpy as np
import pytest

from snakechat.data.records import open_records
from snakechat.evaluation.held_out_prompts import count_contamination, draw_held_out_prompts
from support.dialogues import make_record


@pytest.fixture
def draw(tmp_path):
    """A function that draws prompts from a number of rows of each dataset."""

    def draw_from(kept_of, num_prompts, seed=1, weight=1.0):
        stats = {"kept_of": kept_of, "weights": [weight, 1.0]}
        (tmp_path / "stats.json").write_text(json.dumps({"eval": stats}))
        return draw_held_out_prompts(tmp_path, num_prompts, seed)

    return draw_from


@pytest.mark.parametrize(
    ("kept_of", "weight", "num_prompts", "expected"),
    [
        # Shares follow the weights of training.
        ([500, 500], 3.0, 40, {0: 30, 1: 10}),
        # 2.4 and 0.6 are rounded to the nearest numbers.
        ([800, 200], 1.0, 3, {0: 2, 1: 1}),
        # A dataset with too few rows gives all of them.
        ([2, 50], 100.0, 12, {0: 2, 1: 10}),
    ],
)
def test_shares(draw, kept_of, weight, num_prompts, expected):
    _, datasets = draw(kept_of, num_prompts, weight=weight)
    assert Counter(datasets) == expected


def test_a_first_part_is_in_proportion_and_the_seed_determines_the_draw(draw):
    first, again, other = (draw([800, 200], 100, seed) for seed in (1, 1, 2))
    assert first == again != other
    for length in (5, 10, 50):
        assert first[1][:length].count(1) == length // 5


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
