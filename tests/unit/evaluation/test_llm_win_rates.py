"""An LLM judge in an evaluation: win rates in both orders, and ratings as scores."""

import json

import pytest

from support.evaluation import evaluated, evaluation_job  # noqa: F401
from support.llm_endpoint import llm_server, use_judge  # noqa: F401


@pytest.fixture
def judge_job(job, server):
    """An evaluation with an LLM judge."""
    use_judge(job, server)
    job.settings.llm_judge = "wise"
    return job


def test_the_first_responses_of_rlhf_and_sft_are_compared(judge_job, server):
    server.replies = ["A", "B"]
    metrics, responses = evaluated(judge_job)
    # The first and the last of three prompts, both orders; each has two lines of responses.
    assert len(server.texts) == 4
    for number, text in enumerate(server.texts):
        row = (0, 4)[number // 2]
        ours, theirs = (responses[model][row]["response"].strip() for model in ("rlhf", "sft"))
        first, second = text.split("[RESPONSE A ")[1].split("[RESPONSE B ")
        assert (ours in first and theirs in second) if number % 2 == 0 else ours in second
        assert responses["rlhf"][row]["prompt"].strip() in text
    lines = (judge_job.result / "llm_judge.jsonl").read_text().splitlines()
    assert [json.loads(line)["messages"][1]["content"] for line in lines] == server.texts
    # A, B, then B twice: a win, and a tie.
    rates = metrics["wins"]["rlhf"]["sft"]["llm_judge"]
    assert (rates["mean"], rates["prompts"], rates["unreadable"]) == (0.75, 2, 0)
    # Two prompts say nearly nothing about others.
    assert 0 <= rates["interval_95"][0] < 0.1 and rates["interval_95"][1] == 1
    assert "longer" in rates
    assert judge_job.record["llm_judges"]["wise"]["requests"] == 4


def test_ratings_are_scores(judge_job, server):
    """The score is the weighted sum of ratings and of the other sources."""
    judge_job.settings.llm_judge = None
    judge_job.settings.reward = {"llm_judges/wise": 0.5}
    judge_job.settings.reward_functions = {"length_bounds": 0}
    server.replies = [lambda body: str(1 + len(body["messages"][1]["content"]) % 9)]
    metrics, responses = evaluated(judge_job)
    scores = [line["score"] for lines in responses.values() for line in lines]
    assert len(scores) == 3 * 3 * 2 and set(scores) <= {n / 2 for n in range(1, 10)}
    assert len(set(scores)) > 1
    unreadable = {"base": 0, "sft": 0, "rlhf": 0}
    assert judge_job.facts["unreadable_replies"] == {"llm_judges/wise": unreadable}
    assert "llm_judge" not in metrics["wins"]["rlhf"]["sft"]
