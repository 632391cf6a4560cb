"""split_dataset: rows of the phases, and the held-out tenth of datasets without an eval split."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import split_dataset
from snakechat.data.phase_splits import PHASES, split_rows
from snakechat.data.records import RecordWriter
from support.dialogues import make_record

WEIGHTS = {"sft": 2, "reward": 4, "rlhf": 4}
NAMES = [f"{phase}.{split_name}" for split_name in ("train", "eval") for phase in PHASES]


@pytest.fixture
def split(tmp_path):
    """Return a function that splits prompts; it returns {"sft.train": rows} and the stats."""
    runs = []

    def run(train, eval=None, by="row", weights=WEIGHTS, max_rows=None, seed=1234):
        folder = tmp_path / str(len(runs))
        runs.append(folder)
        records, result = folder / "records", folder / "result"
        records.mkdir(parents=True)
        result.mkdir()
        for split_name, prompts in {"train": train, "eval": eval}.items():
            if prompts is not None:
                with RecordWriter(records / f"{split_name}.parquet") as writer:
                    for prompt in prompts:
                        writer.write(make_record(prompt, " yes", " no"))
        settings = {"seed": seed, "weights": weights, "by": by, "max_rows": max_rows}
        split_dataset.main(
            SimpleNamespace(
                spec={"name": "mine"},
                settings=SimpleNamespace(**settings),
                inputs={"records": records},
                result=result,
                facts={},
            )
        )
        stats = json.loads((result / "stats.json").read_text())
        assert {path.name for path in result.iterdir()} == {
            "stats.json",
            *(f"{name}.npy" for name in NAMES),
        }
        rows = {name: np.load(result / f"{name}.npy", allow_pickle=False) for name in NAMES}
        return rows, stats

    return run


def numbers(name, number):
    return [f"{name}{i}" for i in range(number)]


def lengths(rows, split_name):
    return [len(rows[f"{phase}.{split_name}"]) for phase in PHASES]


def all_rows(rows, split_name):
    return sorted(np.concatenate([rows[f"{phase}.{split_name}"] for phase in PHASES]).tolist())


def shared_prompts(stats):
    key = "rows_whose_prompt_is_in"
    return {name: counts[key] for name, counts in stats.items() if key in counts}


# --- splits -----------------------------------------------------------------------------------


def test_rows_equal_the_permutation_of_deepspeed_chat(split):
    rows, _ = split(numbers("p", 100), numbers("e", 50), seed=7)
    for split_name, number in {"train": 100, "eval": 50}.items():
        expected = split_rows(number, [2, 4, 4], 7)
        for phase, found in zip(PHASES, expected, strict=True):
            assert rows[f"{phase}.{split_name}"].tolist() == sorted(found)


def test_held_out_rows_equal_the_permutation_of_deepspeed_chat(split):
    rows, _ = split(numbers("p", 100), seed=7)
    train, held_out = split_rows(100, [9, 1], 7)
    assert all_rows(rows, "train") == sorted(train)
    assert all_rows(rows, "eval") == sorted(held_out)
    # Phases are slices of the rows in the order of the permutation.
    for split_name, drawn in (("train", train), ("eval", held_out)):
        for phase, places in zip(PHASES, split_rows(len(drawn), [2, 4, 4], 7), strict=True):
            assert rows[f"{phase}.{split_name}"].tolist() == sorted(drawn[places])


# --- limits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["row", "prompt"])
def test_max_rows_limits_training_rows_only(split, by):
    rows, stats = split(numbers("p", 100), numbers("e", 50), by=by, max_rows=20)
    whole, _ = split(numbers("p", 100), numbers("e", 50), by=by)
    assert lengths(rows, "train") == [4, 8, 8]
    assert lengths(rows, "eval") == [10, 20, 20]
    assert [stats[name]["rows"] for name in NAMES] == [4, 8, 8, 10, 20, 20]
    # Drawn from all rows, not the first ones; each of them has the phase that it has anyway.
    assert max(all_rows(rows, "train")) > 50
    assert all(set(rows[name]) <= set(whole[name]) for name in NAMES)


@pytest.mark.parametrize("by", ["row", "prompt"])
def test_max_rows_does_not_count_excluded_rows(split, monkeypatch, by):
    rows, _ = split(numbers("p", 100), numbers("e", 10), by=by, max_rows=20)
    removed = np.sort([rows["reward.train"][0], rows["rlhf.train"][3]])
    nothing = np.empty(0, np.int64)
    monkeypatch.setattr(
        split_dataset, "removed_rows", lambda *_: {"train": removed, "eval": nothing}
    )
    fewer, _ = split(numbers("p", 100), numbers("e", 10), by=by, max_rows=20)
    assert lengths(fewer, "train") == [4, 8, 8]
    assert fewer["sft.train"].tolist() == rows["sft.train"].tolist()
    for name in ("reward.train", "rlhf.train"):
        [lost] = set(rows[name]) - set(fewer[name])
        assert lost in removed and len(set(fewer[name]) - set(rows[name])) == 1


# --- prompts that occur in several rows -------------------------------------------------------


def test_stats_count_rows_whose_prompt_is_in_another_phase(split):
    # All rows of a split have the same prompt.
    rows, stats = split(["a"] * 10, ["b"] * 5)
    assert lengths(rows, "train") == [2, 4, 4]
    assert shared_prompts(stats) == {
        "sft.train": {"reward.train": 2, "rlhf.train": 2},
        "reward.train": {"sft.train": 4, "rlhf.train": 4},
        "rlhf.train": {"sft.train": 4, "reward.train": 4},
        "sft.eval": {"reward.eval": 1, "rlhf.eval": 1},
        "reward.eval": {"sft.eval": 2, "rlhf.eval": 2},
        "rlhf.eval": {"sft.eval": 2, "reward.eval": 2},
    }


def test_stats_count_training_prompts_in_the_eval_split(split):
    weights = {"sft": 1, "reward": 0, "rlhf": 0}
    # Two of four training rows have prompts of the eval split, which has three such rows.
    _, stats = split(["a", "b", "c", "d"], ["a", "x", "a", "b"], weights=weights)
    assert shared_prompts(stats) == {"sft.train": {"sft.eval": 2}, "sft.eval": {"sft.train": 3}}


def test_by_prompt_rows_of_a_prompt_go_to_one_phase(split):
    prompts = np.random.default_rng(1).permutation(numbers("p", 50) * 4).tolist()
    rows, stats = split(prompts, numbers("e", 10), by="prompt")
    assert all_rows(rows, "train") == list(range(200))
    # A fifth and two fifths of the prompts, four rows each.
    assert lengths(rows, "train") == [40, 80, 80]
    assert shared_prompts(stats) == {}
    # Without an eval split, a tenth of the prompts is held out.
    rows, stats = split(prompts, by="prompt")
    assert lengths(rows, "train") == [36, 72, 72]
    assert lengths(rows, "eval") == [4, 8, 8]
    assert sorted([*all_rows(rows, "train"), *all_rows(rows, "eval")]) == list(range(200))
    assert shared_prompts(stats) == {}
