"""A job of evaluate_rlhf on small models with random weights."""

import json
from types import SimpleNamespace

import pytest
import torch

import evaluate_rlhf
from conftest import INIT
from snakechat.data import toy
from snakechat.data.dialogues import parse_prompt
from snakechat.data.ragged_arrays import open_ragged
from snakechat.data.records import open_prompt_texts
from snakechat.jobs.rules import RULES
from snakechat.modeling.loading import load_scorer
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from snakechat.workflow.processes import DEFAULTS, Placement
from support.configs import load

PLACEMENT = Placement(micro_batch_tokens=300)


@pytest.fixture(name="job")
def evaluation_job(tokenizer, tmp_path):
    """A job with base, SFT and RLHF models of different weights, a reward model and a judge."""
    # Space for the toy's responses.
    init = {**INIT, "max_position_embeddings": 128}
    folders = {name: tmp_path / name for name in ("base", "sft", "rlhf", "reward", "judge")}
    for seed, name in enumerate(folders):
        if name in ("reward", "judge"):
            torch.manual_seed(seed)
            model = load_scorer(folders["base"], "fp32", tokenizer, new_head=True)
        else:
            model = make_causal(init, tokenizer, seed)
        save_model(model, tokenizer, folders[name])
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    texts = toy.all_prompts()[:5]
    with open_prompt_texts(tokens, "eval", []) as write:
        write({"prompt": list(map(parse_prompt, texts))}, [True] * len(texts))
    prompts = [tokenizer(prompt).input_ids for prompt in texts]
    with open_ragged(tokens, "eval.prompt", len(tokenizer)) as write_rows:
        write_rows(prompts)
    stats = {"eval": {"kept_of": [len(prompts)], "weights": [1], "template": "dialogue"}}
    (tokens / "stats.json").write_text(json.dumps(stats))
    result = tmp_path / "result"
    result.mkdir()
    settings = RULES["evaluate_rlhf"].describe(load(), "tiny").settings
    settings |= {"num_prompts": 3, "num_generations": 2, "max_response_length": 6, "seed": 1}
    settings |= {"llm_judge_prompts": 2, "trained_on": {}}
    rewards = {key: {"rule": "train_reward"} for key in ("reward", "judge")}
    return SimpleNamespace(
        spec={"inputs": rewards},
        settings=SimpleNamespace(**settings),
        placement=PLACEMENT,
        options=DEFAULTS,
        inputs={**folders, "tokens": tokens},
        result=result,
        facts={},
        record={},
    )


def evaluated(job):
    """Run the job; return its metrics and the responses by model."""
    evaluate_rlhf.main(job)
    responses = {}
    for line in (job.result / "responses.jsonl").read_text().splitlines():
        response = json.loads(line)
        responses.setdefault(response.pop("model"), []).append(response)
    return json.loads((job.result / "metrics.json").read_text()), responses
