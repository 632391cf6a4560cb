"""Rows of each phase, as in DeepSpeed-Chat if its bounds ascend; and the held-out tenth."""

from types import SimpleNamespace

import numpy as np
import pytest

import split_dataset
from snakechat.data.records import (
    PHASES,
    read_digests,
    record_digest,
    removed_rows,
    split_rows,
    write_split,
)
from snakechat.data.row_encoding import weighted_rows
from snakechat.workflow.errors import InputError
from support.encoding import make_record


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


@pytest.mark.parametrize(
    ("number", "weights", "expected"),
    [
        # Shares 1,020.6, 2,041.2 and 2,041.2: rounding leaves none.
        (5103, [2, 4, 4], [1021, 2041, 2041]),
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


# 76,256 rows are Dahoas/rm-static's train split; 33,143 are
# Dahoas/synthetic-instruct-gptj-pairwise's.
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


def test_rows_are_excluded_by_digest(tmp_path):
    rows = [("ab", "c", None), ("a", "bc", None), ("ab", "c", ""), ("ab", None, "c")]
    path, digests = tmp_path / "train.parquet", list(map(record_digest, rows))
    write_split(path, [make_record(*row) for row in rows])
    # They distinguish missing texts, and where one ends.
    assert read_digests(path) == digests and len(set(digests)) == len(rows)

    def excluded(*exclude):
        settings = {"exclude": [each.hex() for each in exclude]}
        job = SimpleNamespace(spec={"inputs": {"records": {"name": "mine"}}})
        return removed_rows(job, settings, {"train": path})["train"].tolist()

    assert excluded(digests[3], digests[1]) == [1, 3]
    with pytest.raises(InputError, match=r"datasets\.mine\.exclude: 0{32} is the digest of no row"):
        excluded(bytes(16))


# --- the program ------------------------------------------------------------------------------

WEIGHTS = {"sft": 2, "reward": 4, "rlhf": 4}
NAMES = [f"{phase}.{split_name}" for split_name in ("train", "eval") for phase in PHASES]


@pytest.fixture
def split(tmp_path_factory):
    """Return a function that splits prompts; it returns {"sft.train": rows}."""

    def run(train, eval=None, by="row", max_rows=None, seed=1234):
        records, result = (tmp_path_factory.mktemp(name) for name in ("records", "result"))
        for split_name, prompts in {"train": train, "eval": eval}.items():
            if prompts is not None:
                rows = [make_record(prompt, " yes", " no") for prompt in prompts]
                write_split(records / f"{split_name}.parquet", rows)
        job = SimpleNamespace(spec={"name": "mine"}, inputs={"records": records}, result=result)
        job.settings = SimpleNamespace(seed=seed, weights=WEIGHTS, by=by, max_rows=max_rows)
        split_dataset.main(job)
        return {name: np.load(result / f"{name}.npy", allow_pickle=False) for name in NAMES}

    return run


def numbers(name, number):
    return [f"{name}{i}" for i in range(number)]


def lengths(rows, split_name):
    return [len(rows[f"{phase}.{split_name}"]) for phase in PHASES]


def test_held_out_rows_equal_the_permutation_of_deepspeed_chat(split):
    rows = split(numbers("p", 100), seed=7)
    train, held_out = split_rows(np.arange(100), [9, 1], 7)
    # Phases are slices of the rows in the order of the permutation.
    for split_name, drawn in (("train", train), ("eval", held_out)):
        for phase, places in zip(
            PHASES, split_rows(np.arange(len(drawn)), [2, 4, 4], 7), strict=True
        ):
            assert rows[f"{phase}.{split_name}"].tolist() == sorted(drawn[places])


@pytest.mark.parametrize("by", ["row", "prompt"])
def test_max_rows_limits_training_rows_only(split, by):
    rows = split(numbers("p", 100), numbers("e", 50), by=by, max_rows=20)
    whole = split(numbers("p", 100), numbers("e", 50), by=by)
    assert lengths(rows, "train") == [4, 8, 8]
    assert lengths(rows, "eval") == [10, 20, 20]
    # Drawn from all rows, not the first ones; each of them has the phase that it has anyway.
    assert max(max(rows[f"{phase}.train"]) for phase in PHASES) > 50
    assert all(set(rows[name]) <= set(whole[name]) for name in NAMES)


def test_max_rows_does_not_count_excluded_rows(split, monkeypatch):
    rows = split(numbers("p", 100), numbers("e", 10), max_rows=20)
    removed = {"train": rows["reward.train"][:1], "eval": np.empty(0, np.int64)}
    monkeypatch.setattr(split_dataset, "removed_rows", lambda *_: removed)
    fewer = split(numbers("p", 100), numbers("e", 10), max_rows=20)
    assert lengths(fewer, "train") == [4, 8, 8]
    assert fewer["sft.train"].tolist() == rows["sft.train"].tolist()
    assert set(rows["reward.train"]) - set(fewer["reward.train"]) == set(removed["train"])


def test_by_prompt_rows_of_a_prompt_go_to_one_phase(split):
    prompts = np.random.default_rng(1).permutation(numbers("p", 50) * 4)
    # A fifth and two fifths of the prompts, four rows each. Without an eval split, a tenth of the
    # prompts is held out.
    for held_out, train, evaluated in (
        (numbers("e", 10), [40, 80, 80], []),
        (None, [36, 72, 72], [4, 8, 8]),
    ):
        rows = split(prompts, held_out, by="prompt")
        splits = ("train", "eval") if evaluated else ("train",)
        assert [lengths(rows, each) for each in splits] == [train, evaluated][: len(splits)]
        found = [rows[f"{phase}.{each}"] for each in splits for phase in PHASES]
        assert sorted(np.concatenate(found).tolist()) == list(range(200))
        of_phases = [set(prompts[each]) for each in found]
        assert sum(map(len, of_phases)) == len(set.union(*of_phases)) == 50
