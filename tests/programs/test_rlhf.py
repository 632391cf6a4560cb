"""train_rlhf in this process, on small models with random weights."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from conftest import INIT
from snakechat.algorithms import reward_functions
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.loading import load_scorer
from snakechat.modeling.saving import save_model
from snakechat.training import placed_models
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import result_files
from support.families import CHECKPOINTS, save_checkpoint
from support.rlhf_training import lines_of, rlhf_inputs, rlhf_training  # noqa: F401
from support.stages import write_manifest


@pytest.fixture
def functions(tmp_path, monkeypatch):
    """A folder of reward functions."""
    folder = tmp_path / "rewards"
    folder.mkdir()
    monkeypatch.setattr(reward_functions, "FOLDER", folder)
    return folder


def values(job, name):
    return [line[name] for line in job.metrics if name in line]


def weights_of(job, folder="."):
    return weights_in(job.result / folder)


def weights_in(folder):
    weights = load_file(folder / "model.safetensors")
    return torch.cat([weights[name].flatten().float() for name in sorted(weights)])


EVALUATIONS = {"eval_steps": 1, "eval_prompts": 12}
DISTILL = {"algorithm": "distill", "reward": None}


def test_distillation_decreases_the_kl_to_the_teacher(train):
    settings = {**EVALUATIONS, "epochs": 3, "actor_learning_rate": 0.01, "warmup_steps": 0}
    job = train(without=("reward",), **DISTILL, **settings)
    # Over the 120 responses of a step.
    kl = values(job, "objective/kl_to_teacher")
    assert kl[-1] < 0.8 * kl[0], kl
    # What the best model is chosen by.
    rewards = values(job, "eval_objective/rlhf_reward")
    kl = values(job, "eval_objective/kl_to_teacher")
    assert rewards == pytest.approx([-each for each in kl], abs=1e-5)
    for line in job.metrics[1:]:
        assert line["policy/first_ratio"] == pytest.approx(1, abs=1e-5)
        # A KL to the initial model, and scores, are not measured.
        assert not {"objective/kl", "objective/kl_coef", "objective/scores"} & line.keys()
        assert "policy/kl_to_teacher" in line and "policy/kl" not in line
    assert "score" not in lines_of(job.result / "responses.jsonl")[0]


def test_a_teacher_with_another_vocabulary_is_refused(train, inputs, tmp_path, monkeypatch):
    folder = shutil.copytree(inputs["teacher"]["path"], tmp_path / "other")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<unk>", "<UNK>"))
    write_manifest(folder)
    monkeypatch.setitem(inputs, "teacher", {"rule": "fetch_model", "path": str(folder)})
    with pytest.raises(
        InputError, match=f"^teacher: {folder} has another tokenizer than the actor"
    ):
        train(**DISTILL)


def test_a_classifier_of_another_family_reads_its_own_rendering(
    train, inputs, tmp_path, monkeypatch
):
    base, folder = save_checkpoint(CHECKPOINTS["qwen2.5"], tmp_path / "base"), tmp_path / "scorer"
    tokenizer = load_tokenizer(base)
    torch.manual_seed(2)
    scorer = load_scorer(base, "fp32", tokenizer, new_head=True).eval()
    save_model(scorer, tokenizer, folder)
    write_manifest(folder)
    monkeypatch.setitem(inputs, "reward", {"rule": "fetch_model", "path": str(folder)})
    job = train(reward_templates={"reward": "chat"}, max_steps=1, log_responses_steps=1)
    # A critic cannot start from it, but from the actor: a score for each hidden state more.
    actor, critic = (job.record["models"][name] for name in ("actor", "critic"))
    assert critic["weights"] == actor["weights"] + INIT["hidden_size"]
    for line in lines_of(job.result / "responses.jsonl")[:8]:
        question = line["prompt"].removeprefix("\n\nHuman:").removesuffix("\n\nAssistant:").strip()
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": line["response"].removeprefix(" ")},
        ]
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=False)
        with torch.no_grad():
            assert scorer(ids).logits.item() == pytest.approx(line["score"], abs=1e-4)


def test_evaluations_on_held_out_prompts_leave_the_training_as_it_is(train):
    plain, evaluated = train(), train(name="evaluated", **EVALUATIONS)
    added = evaluated.metrics[0].keys() - {"step"}
    assert {"eval_objective/rlhf_reward", "eval_response/length"} <= added
    for line, expected in zip(evaluated.metrics[1:], plain.metrics, strict=True):
        assert line.keys() == expected.keys() | added
        assert expected == {name: line[name] for name in expected}
    assert torch.equal(weights_of(plain), weights_of(evaluated))
    kl = values(evaluated, "eval_objective/kl")
    assert kl[0] == pytest.approx(0, abs=1e-5)
    assert abs(kl[2]) > 1e-4
    # The same prompts and random numbers each time: before and after one step, most are equal.
    before, after = values(evaluated, "eval_response/length")[:2]
    assert before == pytest.approx(after, abs=0.5)


def test_the_best_of_several_models_is_saved(train):
    # A learning rate that destroys the actor after the first step.
    broken = {"actor_learning_rate": 1.0, "lr_schedule": "linear", "warmup_steps": 4}
    job = train(save_strategy="best", keep_steps=1, ema_decay=0.5, **broken, **EVALUATIONS)
    rewards = values(job, "eval_objective/rlhf_reward")[1:]
    best = 1 + int(np.argmax(rewards))
    for folder in (".", "ema"):
        kept = weights_of(job, f"step-{best}/{folder}")
        assert torch.equal(weights_of(job, folder), kept)
        assert not torch.equal(weights_of(job, f"step-{3 - best}/{folder}"), kept)


def test_responses_are_logged_every_log_responses_steps(train):
    job = train(num_generations=2, rollout_batch_size=60, max_response_length=6)
    lines = lines_of(job.result / "responses.jsonl")
    # Two responses to the first eight prompts of steps 1, 2 and 4.
    assert [line["step"] for line in lines] == [1] * 16 + [2] * 16 + [4] * 16
    assert [line["prompt"] for line in lines[:8]] == [line["prompt"] for line in lines[8:16]]
    assert len({line["score"] for line in lines}) > 16
    assert {line["kl"] for line in lines[:16]} == {0.0}


def test_with_adapters_the_reference_is_the_base_model_without_a_copy(train, monkeypatch):
    loaded = []
    load = placed_models.load_causal
    monkeypatch.setattr(placed_models, "load_causal", lambda *a: loaded.append(a[0]) or load(*a))
    job = train(lora_rank=4, critic_lora_rank=4, critic_lora_alpha=8, actor_learning_rate=0.01)
    assert len(loaded) == 1
    kl = values(job, "objective/kl")
    assert kl[0] == 0.0 != kl[1]
    assert (job.result / "adapter/adapter_model.safetensors").exists()
    for model in (job.record["models"][name] for name in ("actor", "critic")):
        assert model["trained"] < model["weights"] / 2


def test_only_the_critic_is_trained_in_its_warmup_steps(train, inputs):
    # A target that no KL reaches: 20 % less after each horizon of responses.
    job = train(critic_warmup_steps=2, kl_target=1e6, kl_horizon=120)
    assert torch.equal(weights_of(job), weights_in(Path(inputs["actor"]["path"])))
    assert not values(job, "policy/loss")
    assert len(values(job, "value/loss")) == 2
    first, second = values(job, "objective/kl_coef")
    assert second == pytest.approx(0.8 * first)


ALL = {
    "ema_decay": 0.9,
    "kl_target": 1.0,
    "kl_horizon": 1000,
    "standardize_scores": "first",
    "ptx_coef": 27.8,
    "log_responses_steps": 1,
    "rollout_batch_size": 60,
    "max_steps": 3,
}
STOPS = """
import os, signal
calls = 0
def score(prompts, responses):
    global calls
    calls += 1
    if calls == {at}:
        {action}
    return [float(len(a)) for a in responses]
"""


def test_a_resumed_run_ends_with_the_same_bytes(train, functions):
    program = functions / "stops.py"
    settings = ALL | {"reward_functions": {"stops": 0.1}}
    program.write_text(STOPS.format(at=0, action="pass"))
    whole = result_files(train(**settings).result)
    program.write_text(STOPS.format(at=2, action="os.kill(os.getpid(), signal.SIGTERM)"))
    with pytest.raises(SystemExit, match="stopped by SIGTERM after step 1"):
        train(**settings)
    program.write_text(STOPS.format(at=0, action="pass"))
    job = train(**settings)
    assert job.record["resumed_after_step"] == 1
    # The text is trained on as well.
    assert values(job, "ptx/loss")[-1] < values(job, "ptx/loss")[0]
    assert result_files(job.result) == whole
    assert {"ema/model.safetensors", "responses.jsonl"} <= whole.keys()


def test_zero_stages_agree(train):
    first, other = (
        train(
            {"zero_stage": stage, "critic_zero_stage": critic},
            **{"ema_decay": 0.9, "rollout_batch_size": 32, "global_batch_size": 16, "max_steps": 2},
        )
        for stage, critic in ((0, 0), (3, 2))
    )
    for line, expected in zip(other.metrics, first.metrics, strict=True):
        assert line == pytest.approx(expected, rel=1e-3, abs=1e-4)
    for folder in (".", "ema"):
        assert (weights_of(other, folder) - weights_of(first, folder)).abs().max() < 1e-3
