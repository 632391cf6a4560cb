"""split_dataset: rows of the phases, and the held-out tenth of datasets without an eval split."""

from types import SimpleNamespace

import numpy as np
import pytest

import split_dataset
from snakechat.data.phase_splits import PHASES, split_rows
from snakechat.data.records import open_records
from support.dialogues import make_record

WEIGHTS = {"sft": 2, "reward": 4, "rlhf": 4}
NAMES = [f"{phase}.{split_name}" for split_name in ("train", "eval") for phase in PHASES]


@pytest.fixture
def split(tmp_path_factory):
    """Return a function that splits prompts; it returns {"sft.train": rows}."""

    def run(train, eval=None, by="row", max_rows=None, seed=1234):
        records, result = (tmp_path_factory.mktemp(name) for name in ("records", "result"))
        for split_name, prompts in {"train": train, "eval": eval}.items():
            if prompts is not None:
                with open_records(records / f"{split_name}.parquet") as write:
                    for prompt in prompts:
                        write(make_record(prompt, " yes", " no"))
        settings = {"seed": seed, "weights": WEIGHTS, "by": by, "max_rows": max_rows}
        split_dataset.main(
            SimpleNamespace(
                spec={"name": "mine"},
                settings=SimpleNamespace(**settings),
                inputs={"records": records},
                result=result,
                facts={},
            )
        )
        return {name: np.load(result / f"{name}.npy", allow_pickle=False) for name in NAMES}

    return run


def numbers(name, number):
    return [f"{name}{i}" for i in range(number)]


def lengths(rows, split_name):
    return [len(rows[f"{phase}.{split_name}"]) for phase in PHASES]


def all_rows(rows, split_name):
    return sorted(np.concatenate([rows[f"{phase}.{split_name}"] for phase in PHASES]).tolist())


def assert_no_prompt_is_shared(rows, prompts):
    """Check the rows of train.parquet."""
    of_phases = [{prompts[row] for row in rows[f"{phase}.train"]} for phase in PHASES]
    assert sum(map(len, of_phases)) == len(set.union(*of_phases))


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
    assert max(all_rows(rows, "train")) > 50
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
    prompts = np.random.default_rng(1).permutation(numbers("p", 50) * 4).tolist()
    rows = split(prompts, numbers("e", 10), by="prompt")
    assert all_rows(rows, "train") == list(range(200))
    # A fifth and two fifths of the prompts, four rows each.
    assert lengths(rows, "train") == [40, 80, 80]
    assert_no_prompt_is_shared(rows, prompts)
    # Without an eval split, a tenth of the prompts is held out.
    rows = split(prompts, by="prompt")
    assert lengths(rows, "train") == [36, 72, 72]
    assert lengths(rows, "eval") == [4, 8, 8]
    assert sorted([*all_rows(rows, "train"), *all_rows(rows, "eval")]) == list(range(200))
    assert_no_prompt_is_shared(rows, prompts)
