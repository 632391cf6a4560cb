"""Rows of each phase: those of DeepSpeed-Chat, if its bounds ascend."""

from types import SimpleNamespace

import numpy as np
import pytest

from snakechat.data.phase_splits import removed_rows, split_rows, weighted_rows
from snakechat.data.records import open_records, read_digests, record_digest
from snakechat.workflow.errors import InputError
from support.dialogues import make_record


def slices_of_deepspeed_chat(number, weights, seed):
    """Return the rows of each phase as in data_utils.py."""
    bounds = [0]
    for weight in weights:
        bounds.append(bounds[-1] + round(weight / sum(weights) * float(number)))
    surplus = bounds[-1] - number
    bounds = [0, *(bound - surplus for bound in bounds[1:])]
    order = np.arange(number, dtype=np.uint32)
    np.random.RandomState(seed).shuffle(order)
    return [order[bounds[i] : bounds[i + 1]].tolist() for i in range(len(weights))]


# 76,256 and 5,103 rows are Dahoas/rm-static's train and test; 33,143 are
# Dahoas/synthetic-instruct-gptj-pairwise's.
@pytest.mark.parametrize(
    ("number", "weights", "expected"),
    [
        # Shares 15,251.2, 30,502.4 and 30,502.4; the row that rounding leaves is the first's.
        (76256, [2, 4, 4], [15252, 30502, 30502]),
        # Shares 1,020.6, 2,041.2 and 2,041.2: rounding leaves none.
        (5103, [2, 4, 4], [1021, 2041, 2041]),
        # Shares 29,828.7 and 3,314.3.
        (33143, [9, 1], [29829, 3314]),
        (10, [0, 1, 0], [0, 10, 0]),
        (0, [2, 4, 4], [0, 0, 0]),
        # Shares 0, 1.5 and 1.5 are rounded to 0, 2 and 2: four rows of three.
        (3, [0, 5, 5], [0, 1, 2]),
        # Shares 0, 2.5 and 2.5 are rounded to 0, 2 and 2: the fifth row goes to a phase with a
        # weight, where DeepSpeed-Chat gives it to the first.
        (5, [0, 5, 5], [0, 3, 2]),
    ],
)
def test_sizes_of_the_phases(number, weights, expected):
    assert [len(rows) for rows in split_rows(np.arange(number), weights, 1234)] == expected


@pytest.mark.parametrize(
    ("number", "weights"), [(76256, [2, 4, 4]), (33143, [9, 1]), (97, [0.1, 0.2, 0.7])]
)
def test_phases_are_slices_of_the_permutation_of_deepspeed_chat(number, weights):
    expected = slices_of_deepspeed_chat(number, weights, 1234)
    # The values of groups do not matter.
    phases = split_rows(np.random.default_rng(1).permutation(number), weights, 1234)
    assert [rows.tolist() for rows in phases] == [list(rows) for rows in expected]


def test_weights_repeat_rows_and_draw_the_rest():
    drawn = weighted_rows(np.arange(10), 2.5, 5)
    assert drawn.tolist() == sorted(drawn.tolist())
    assert sorted(np.bincount(drawn).tolist()) == [2] * 5 + [3] * 5
    # Not the first half.
    half = weighted_rows(np.arange(10, 20), 0.5, 5).tolist()
    assert len(set(half)) == 5 and set(half) < set(range(10, 20)) and half != [*range(10, 15)]


def test_digests_distinguish_missing_texts_and_boundaries():
    texts = [("ab", "c", None), ("a", "bc", None), ("ab", "c", ""), ("ab", None, "c")]
    assert len(set(map(record_digest, texts))) == len(texts)


def test_rows_are_excluded_by_digest(tmp_path):
    rows = [
        ("Ann?", " Yes.", " No."),
        ("Bob?", " Yes.", None),
        ("Cid?", " A.", ""),
        ("Bob?", "", ""),
    ]
    path, digests = tmp_path / "train.parquet", list(map(record_digest, rows))
    with open_records(path) as write:
        for row in rows:
            write(make_record(*row))
    assert read_digests(path) == digests

    def excluded(*exclude):
        settings = {"exclude": [each.hex() for each in exclude]}
        job = SimpleNamespace(spec={"inputs": {"records": {"name": "mine"}}})
        return removed_rows(job, settings, {"train": path})["train"].tolist()

    assert excluded(digests[3], digests[1]) == [1, 3]
    with pytest.raises(InputError, match=r"datasets\.mine\.exclude: 0{32} is the digest of no row"):
        excluded(bytes(16))
