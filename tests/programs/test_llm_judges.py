"""LLM judges in RLHF and as labellers of pairs, in this process."""

import json

import pytest

from snakechat.config.sections import judge_access, judge_settings
from snakechat.data.records import read_texts
from snakechat.workflow.processes import RunOptions
from support.llm_endpoint import (  # noqa: F401
    compared_responses,
    judge_entry,
    llm_server,
)
from support.rlhf_training import rlhf_inputs, rlhf_training  # noqa: F401
from support.stages import stages_of_small_model, toy_rows


def length_rating(body):
    """Rate longer responses higher, from 1 to 10."""
    response = body["messages"][1]["content"].split("[RESPONSE ")[1].split("]\n", 1)[1]
    return str(min(1 + len(response.split("\n[")[0]), 10))


def test_rlhf_trains_on_the_ratings_of_a_judge(server, train, tmp_path):
    server.replies = [length_rating]
    judges = {"wise": judge_entry(server, concurrency=4)}
    job = train(
        options=RunOptions(stores=[str(tmp_path)], llm_judges=judge_access(judges, judges)),
        without=("reward",),
        reward="llm_judges/wise",
        llm_judges=judge_settings(judges, judges),
        algorithm="rloo",
        num_generations=2,
        kl_in="loss",
        kl_estimator="k2",
        max_steps=2,
    )
    usage = job.record["llm_judges"]["wise"]
    assert usage["requests"] == len(server.requests) > 100
    assert usage["completion_tokens"] == 2 * len(server.requests)
    assert [line["rewards/llm_judges/wise/unreadable"] for line in job.metrics] == [0, 0]
    assert all(1 < line["objective/scores"] < 10 for line in job.metrics)


def longer(body):
    """Prefer the longer response."""
    lengths = [len(text) for text in compared_responses(body)]
    return "C" if lengths[0] == lengths[1] else "AB"[lengths[1] > lengths[0]]


@pytest.fixture
def stages(server, tokenizer, group, tmp_path):
    """A dataset with labels."""
    datasets = {"labelled": {"label": "toy", "llm_judge": "wise"}}
    judges = {"wise": judge_entry(server)}
    with stages_of_small_model(tmp_path, tokenizer, toy_rows(8), {}, datasets, judges) as stages:
        yield stages


def test_pairs_are_labelled_in_both_orders(stages, server):
    server.replies = [longer]
    job = stages.run("label_pairs", "labelled")
    given = {p: {a, b} for p, a, b in read_texts(stages.folder / "records/train.parquet")}
    labelled = list(read_texts(job.target / "train.parquet"))
    for prompt, chosen, rejected in labelled:
        assert {chosen, rejected} == given[prompt] and len(chosen) > len(rejected)
    expected = {p: a for p, a, _ in read_texts(stages.folder / "records/train.parquet")}
    swapped = sum(chosen != expected[prompt] for prompt, chosen, _ in labelled)
    assert job.facts["swapped"]["train"] == swapped
    assert len(labelled) + sum(job.facts["dropped"]["train"].values()) == 8
    # Both splits have the same rows: each pair is asked once in each order.
    assert len(server.requests) == 16 == job.record["llm_judges"]["wise"]["requests"]
    assert json.loads((job.target / "stats.json").read_text())["train"]["rows"] == len(labelled)
