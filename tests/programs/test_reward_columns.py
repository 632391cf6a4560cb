"""Reward functions in a build: columns of a dataset without responses."""

import json

import pytest

from support.files import as_jsonl

# Asserts what it receives in training and evaluation.
SPY = """
def score(prompts, responses, messages, value, **columns):
    assert sorted(columns) == ["level"], columns
    for prompt, response, turns, number in zip(prompts, responses, messages, value, strict=True):
        assert [turn["role"] for turn in turns[-2:]] == ["user", "assistant"]
        question = turns[-2]["content"]
        assert question in prompt and turns[-1]["content"] == response
        # Rows of the other dataset have no such column.
        assert number == (int(question.split()[-1]) if question.startswith("Write") else None)
    return [len(response) for response in responses]
"""
RECIPE = {
    "preset": "grpo",
    "actor": "sft/tiny",
    "reward": None,
    "reward_functions": {"spy": 1},
    "datasets": [{"toy": 0.1}, "numbers"],
    "judge": None,
    "num_generations": 2,
    "rollout_batch_size": 16,
    "global_batch_size": 32,
    "max_prompt_length": 96,
    "max_response_length": 8,
    "epochs": 1,
    "dtype": "fp32",
    "lora_rank": 0,
    "placement": {"deployment": "cpu"},
}
DATASET = {
    "path": "numbers.jsonl",
    "format": "prompt",
    "columns": {"prompt": "question"},
    "keep": ["answer.value", "level"],
}


def test_columns_and_messages_reach_functions_in_training_and_evaluation(quick, tmp_path):
    workflow = quick.copy(tmp_path / "copy")
    (workflow.folder / "rewards/spy.py").write_text(SPY)
    rows = [
        {"question": f"Write the number {i}", "answer": {"value": i}, "level": "easy"}
        for i in range(40)
    ]
    (workflow.folder / "numbers.jsonl").write_bytes(as_jsonl(rows))
    config = {"datasets": {"numbers": DATASET}, "rlhf": {"recipes": {"mine": RECIPE}}}
    (workflow.folder / "mine.yaml").write_text(json.dumps(config))
    # Later files have precedence.
    workflow.options = (*workflow.options, "mine.yaml")
    workflow.build("output/rlhf/mine")
    output = workflow.folder / "output"
    stats = json.loads((output / "split/numbers/stats.json").read_text())
    assert stats["rlhf.train"]["rows"] == 36 and stats["sft.train"]["rows"] == 0
    metrics = json.loads((output / "eval/rlhf/mine/metrics.json").read_text())
    assert metrics["rlhf"]["score"] > 0
    # Of 20 prompts; all 4 of numbers.
    numbers, toy = (metrics["by_dataset"][name] for name in ("numbers", "toy"))
    assert (numbers["num_prompts"], toy["num_prompts"]) == (4, 16)
    mean = (4 * numbers["rlhf"]["score"] + 16 * toy["rlhf"]["score"]) / 20
    assert mean == pytest.approx(metrics["rlhf"]["score"])
    assert metrics["contamination"].keys() == {"rlhf/numbers", "rlhf/toy", "sft/toy"}
