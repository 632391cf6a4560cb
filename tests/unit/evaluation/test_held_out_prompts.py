"""Prompts of an evaluation: their shares of a blend, and training rows with the same prompt."""

import json
from collections import Counter

import numpy as np
import pytest

from snakechat.data.records import write_split
from snakechat.evaluation.held_out_prompts import count_contamination, draw_held_out_prompts
from support.encoding import make_record


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
def test_prompts_are_drawn_in_proportion(tmp_path, kept_of, weight, num_prompts, expected):
    stats = {"kept_of": kept_of, "weights": [weight, 1.0]}
    (tmp_path / "stats.json").write_text(json.dumps({"eval": stats}))
    (rows, datasets), again, other = (
        draw_held_out_prompts(tmp_path, num_prompts, seed) for seed in (1, 1, 2)
    )
    assert Counter(datasets) == expected
    # Each row once, from its dataset and in order.
    assert [int(row >= kept_of[0]) for row in rows] == datasets
    for dataset in expected:
        own = [row for row, of in zip(rows, datasets, strict=True) if of == dataset]
        assert own == sorted(set(own)) and own[-1] < sum(kept_of)
    # Any first part is in proportion too, and the seed determines the draw.
    if num_prompts == 40:
        assert [datasets[:length].count(1) for length in (4, 12, 20)] == [1, 3, 5]
    assert (rows, datasets) == again != other


def test_contamination_of_each_phase(tmp_path, capsys):
    # Of four training rows, sft has the first two, reward the last two.
    records, rows = tmp_path / "records", tmp_path / "rows"
    records.mkdir()
    rows.mkdir()
    texts = ("What is 2 + 2?", "Who are you?", "Who  are YOU ?!", "Why?")
    write_split(records / "train.parquet", map(make_record, texts))
    np.save(rows / "sft.train.npy", np.array([0, 1]))
    np.save(rows / "reward.train.npy", np.array([2, 3]))
    inputs = {"records.a": records, "rows.a": rows}
    prompts = ["Who are you?\n", "who are you", "What is 2 * 2?", "Where?"]
    counts = count_contamination(prompts, {"a": ["sft", "reward"]}, inputs)
    assert counts == {"sft/a": 2, "reward/a": 2}
    message = capsys.readouterr().err
    assert "2 of 4 evaluation prompts are also training prompts of sft/a" in message
