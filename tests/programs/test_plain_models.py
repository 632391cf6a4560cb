"""RLHF from plain model folders: an actor and a classifier of another family, no other recipe."""

import json

import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from conftest import INIT, Workflow, copy_sources
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.loading import load_scorer
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from support.families import CHECKPOINTS, save_checkpoint

# With the dialogue format. The classifier is a Qwen2 with its own chat template.
ACTOR = {**INIT, "max_position_embeddings": 128}
RECIPE = {
    "actor": "models/actor",
    "reward": "models/scorer",
    "judge": {"models/scorer": 2},
    "datasets": ["toy"],
    "max_prompt_length": 64,
    "max_response_length": 8,
    "rollout_batch_size": 64,
    "global_batch_size": 64,
    "actor_learning_rate": 1.0e-3,
    "critic_learning_rate": 1.0e-3,
    "warmup_steps": 0,
    "log_responses_steps": 1,
    "dtype": "fp32",
    "placement": "cpu",
}

CONFIG = {
    "datasets": {"toy": {"rows": 400, "eval_rows": 50}},
    "models": {
        "actor": {"path": "actor", "template": "dialogue"},
        "scorer": {"path": "scorer", "template": "chat"},
    },
    "rlhf": {"recipes": {"plain": RECIPE}},
    "evaluation": {"num_prompts": 10, "num_generations": 2},
}


@pytest.fixture(scope="module")
def built(tmp_path_factory, tokenizer):
    """A workflow with the model folders and the built recipe."""
    folder = tmp_path_factory.mktemp("plain") / "work"
    copy_sources(folder)
    save_model(make_causal(ACTOR, tokenizer, 1), tokenizer, folder / "actor")
    base = save_checkpoint(CHECKPOINTS["qwen2.5"], folder / "base")
    chatml = load_tokenizer(base)
    torch.manual_seed(2)
    save_model(load_scorer(base, "fp32", chatml, new_head=True), chatml, folder / "scorer")
    (folder / "mine.yaml").write_text(yaml.safe_dump(CONFIG))
    workflow = Workflow(folder, "--configfile", "mine.yaml")
    workflow.build("output/rlhf/plain")
    return workflow


def test_no_other_recipe_is_built(built):
    output = built.folder / "output"
    assert not any((output / stage).exists() for stage in ("sft", "reward", "dpo"))
    lineage = json.loads((output / "rlhf/plain/manifest.json").read_text())["lineage"]
    assert [job["rule"] for job in lineage.values()].count("fetch_model") == 2


def test_the_critic_starts_from_the_actor(built):
    run = json.loads((built.folder / "output/rlhf/plain/run.json").read_text())
    actor, critic = run["models"]["actor"], run["models"]["critic"]
    # A score for each hidden state more, and a tied output layer as large as the embeddings.
    assert critic["weights"] == actor["weights"] + ACTOR["hidden_size"]


def test_logged_scores_are_those_of_the_classifier_on_its_own_rendering(built):
    output = built.folder / "output"
    tokenizer = AutoTokenizer.from_pretrained(output / "models/scorer")
    scorer = AutoModelForSequenceClassification.from_pretrained(output / "models/scorer").eval()
    lines = (output / "rlhf/plain/responses.jsonl").read_text().splitlines()
    for line in map(json.loads, lines[:8]):
        question = line["prompt"].removeprefix("\n\nHuman:").removesuffix("\n\nAssistant:").strip()
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": line["response"].removeprefix(" ")},
        ]
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=False)
        with torch.no_grad():
            assert scorer(ids).logits.item() == pytest.approx(line["score"], abs=1e-4)


def test_the_evaluation_compares_with_the_base_model(built):
    output = built.folder / "output"
    metrics = json.loads((output / "eval/rlhf/plain/metrics.json").read_text())
    assert metrics["intervals_95"].keys() == {"base", "rlhf"}
    assert metrics["wins"]["rlhf"].keys() == {"base"}
    assert metrics["base"]["kl_to_base"] == pytest.approx(0, abs=1e-4)
    assert abs(metrics["rlhf"]["kl_to_base"]) > 0.01
    difference = metrics["rlhf"]["score"] - metrics["base"]["score"]
    assert metrics["score_difference"]["mean"] == pytest.approx(difference)
    for model in ("base", "rlhf"):
        judged = metrics[model]["judge_score"]
        assert judged == pytest.approx(2 * metrics[model]["score"], rel=1e-4)
    page = (output / "report/rlhf/plain/report.html").read_text()
    assert "models/actor" in page and "models/scorer" in page and "RLHF \N{MINUS SIGN} base" in page
