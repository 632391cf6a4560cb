"""Generations: responses are sampled, scored and selected, in this process."""

import json
import random

import numpy as np
import pytest

import generate_responses
from snakechat.data import toy
from snakechat.data.records import read_records
from snakechat.data.scored_responses import read_scored_responses
from snakechat.data.tokens import Ragged
from support.stages import stages_of_small_model

# DeepSpeed calls functions of torch that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

COMMON = {"model": "random", "datasets": ["toy"], "dtype": "fp32"}
COMMON["placement"] = {"deployment": "cpu"}
GENERATIONS = {
    **COMMON,
    "reward": {"tiny": 0.5},
    # Longer responses are better.
    "reward_functions": {"length_bounds": {"weight": 2, "arguments": {"min_characters": 12}}},
    "max_prompt_length": 60,
    "max_response_length": 20,
    "num_generations": 8,
}
RECIPES = {
    "reward": {"tiny": {**COMMON, "epochs": 1, "max_length": 64, "global_batch_size": 8}},
    "generations": {"mine": GENERATIONS, "other": {**GENERATIONS, "seed": 5}},
}
DATASETS = {
    "best": {"generations": "mine", "select": "best"},
    "pairs": {"generations": "mine", "select": "best_and_worst"},
}


@pytest.fixture(scope="module")
def stages(tokenizer, group, tmp_path_factory):
    """Generations of a small random model to 40 prompts, in batches of 16."""
    rows, _ = toy.make_rows(40, 0, random.Random(1))
    records = [tuple(row.values()) for row in rows]
    rows = {"train": records, "eval": records}
    folder = tmp_path_factory.mktemp("generations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate_responses, "BATCH_SIZE", 16)
        with stages_of_small_model(folder, tokenizer, rows, RECIPES, DATASETS) as stages:
            yield stages


def responses_of(folder, split="train"):
    ids = Ragged(folder, f"{split}.responses")
    return [ids[row].tolist() for row in range(len(ids))]


def test_each_prompt_has_several_responses(stages):
    folder = stages.result("generate_responses", "mine")
    assert len(responses_of(folder)) == 40 * 8
    assert len(responses_of(folder, "eval")) == 40 * 8
    # A random model repeats itself rarely.
    assert len(set(map(tuple, responses_of(folder)))) > 300


def test_an_interrupted_run_continues_with_the_same_responses(stages, monkeypatch):
    whole = responses_of(stages.result("generate_responses", "mine"))
    save, saved = generate_responses.save_batch, []

    def save_two(folder, *arguments):
        if len(saved) == 2:
            raise KeyboardInterrupt
        saved.append(folder.name)
        save(folder, *arguments)

    monkeypatch.setattr(generate_responses, "save_batch", save_two)
    stages.made.pop(("generate_responses", "mine"))
    with pytest.raises(KeyboardInterrupt):
        stages.result("generate_responses", "mine")
    monkeypatch.setattr(
        generate_responses, "save_batch", lambda *a: saved.append(a[0].name) or save(*a)
    )
    assert responses_of(stages.result("generate_responses", "mine")) == whole
    # Batches of 16 prompts; none was sampled twice.
    assert saved == [f"{split}-{n:09}" for split in ("train", "eval") for n in (0, 16, 32)]


def test_the_seed_determines_the_responses(stages):
    one, other = (stages.result("generate_responses", name) for name in ("mine", "other"))
    assert responses_of(one) != responses_of(other)


def test_scores_are_the_weighted_sum_of_models_and_functions(stages):
    responses = stages.result("generate_responses", "mine")
    rows = list(read_scored_responses(stages.result("score_responses", "mine") / "train.parquet"))
    assert len(rows) == 40
    prompts = [prompt for prompt, *_ in read_records(stages.folder / "records/train.parquet")]
    assert [row.prompt for row in rows] == prompts
    ids = responses_of(responses)
    assert [len(row.responses) for row in rows] == [8] * 40
    assert [ended for row in rows for ended in row.ended] == [row[-1] == 2 for row in ids]
    # The function gives 1 or less; the weight of 2 separates long from short responses.
    lengths = [len(text.strip()) for row in rows for text in row.responses]
    scores = np.array([score for row in rows for score in row.scores])
    is_long = np.array(lengths) >= 12
    assert scores[is_long].mean() > scores[~is_long].mean() + 0.5


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_best_responses_become_records(dataset, stages):
    job = stages.run("select_responses", dataset)
    rows = list(read_scored_responses(stages.result("score_responses", "mine") / "train.parquet"))
    records = list(read_records(job.target / "train.parquet"))
    ended = {
        row.prompt: [
            (s, r) for s, r, e in zip(row.scores, row.responses, row.ended, strict=True) if e
        ]
        for row in rows
    }
    dropped = job.facts["dropped"]["train"]
    assert len(records) + sum(dropped.values()) == len(rows)
    assert dropped["no response ended"] == sum(not found for found in ended.values())
    for prompt, chosen, rejected in records:
        scores = dict((text.strip(), score) for score, text in reversed(ended[prompt]))
        assert scores[chosen.strip()] == max(scores.values())
        if dataset == "pairs":
            assert scores[rejected.strip()] == min(scores.values()) < max(scores.values())
        else:
            assert rejected is None
    stats = json.loads((job.target / "stats.json").read_text())
    assert stats["train"]["rows"] == len(records)
