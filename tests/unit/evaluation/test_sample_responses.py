"""Responses to the first held-out prompts: which prompts, and what is written."""

import json

from snakechat.evaluation.sample_responses import PROMPTS, first_prompts, write_responses
from snakechat.modeling.batching import Examples


def test_the_first_different_prompts_are_chosen():
    prompts = [[5, number // 2] for number in range(2 * PROMPTS + 4)]
    assert first_prompts(Examples(prompts, prompts)) == list(range(0, 2 * PROMPTS, 2))
    assert first_prompts(Examples([[5]] * 3, [[6]] * 3)) == [0]


def test_the_row_itself_comes_before_the_models(tokenizer, tmp_path):
    prompt, response = (tokenizer(text).input_ids for text in ("A hat?", " Yes."))
    examples = Examples([prompt], [[*response, tokenizer.eos_token_id]])
    path = tmp_path / "responses.jsonl"
    write_responses(path, tokenizer, examples, {"sft": [{"text": "No.", "ended": True}]})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["model"], line["response"].strip()) for line in lines] == [
        ("data", "Yes."),
        ("sft", "No."),
    ]
    assert lines[0]["prompt"] == lines[1]["prompt"] == "A hat?"
