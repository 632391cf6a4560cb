"""The inputs of train_rlhf: small models with random weights, and tokens of the toy dataset."""

import json
import random

import torch

from conftest import INIT
from snakechat.data import toy
from snakechat.data.dialogues import parse_prompt
from snakechat.data.prompt_texts import open_prompt_texts
from snakechat.data.tokenizers import Encoder
from snakechat.data.tokens import RaggedWriter
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Scorer, response_scores
from snakechat.modeling.loading import load_scorer
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from snakechat.workflow.manifest import manifest_path

NUM_PROMPTS, NUM_PAIRS, NUM_PROBES = 240, 64, 16
PLACEMENT = {
    "nodes": 1,
    "gpus_per_node": 0,
    "zero_stage": 0,
    "offload": "none",
    "activation_checkpointing": False,
    "micro_batch_tokens": 8192,
    "save_steps": 20,
}
# Two steps of two updates each.
SETTINGS = {
    "seed": 1234,
    "algorithm": "ppo",
    "actor": "tiny",
    "reward": "tiny",
    "ptx": None,
    "ptx_coef": 27.8,
    "reward_functions": {},
    "datasets": [["toy", 1.0]],
    "max_prompt_length": 48,
    "max_response_length": 8,
    "epochs": 1,
    "max_steps": None,
    "keep_steps": 0,
    "save_dtype": None,
    "eval_steps": 0,
    "eval_prompts": 0,
    "save_strategy": "last",
    "early_stopping_patience": 0,
    "rollout_batch_size": 120,
    "num_generations": 1,
    "generation_backend": "hf",
    "temperature": 1.0,
    "importance_sampling_cap": 2.0,
    "global_batch_size": 60,
    "ppo_epochs": 1,
    "actor_learning_rate": 1.0e-3,
    "critic_learning_rate": 1.0e-3,
    "lr_schedule": "constant",
    "critic_lr_schedule": "constant",
    "warmup_steps": 5,
    "min_lr_ratio": 0.0,
    "weight_decay": 0.0,
    "adam_betas": [0.9, 0.95],
    "max_grad_norm": 1.0,
    "critic_warmup_steps": 0,
    "align_overflow": False,
    "ema_decay": 0.0,
    "clip_range": 0.2,
    "clip_range_high": None,
    "importance_sampling_level": "token",
    "loss_aggregation": "token_mean",
    "scale_by_std": True,
    "drop_uniform_groups": False,
    "value_clip_range": 0.0,
    "gamma": 1.0,
    "gae_lambda": 0.95,
    "whiten_rewards": False,
    "whiten_advantages": True,
    "max_approx_kl": None,
    "kl_in": "rewards",
    "kl_estimator": "k1",
    "kl_coef": 0.15,
    "kl_target": None,
    "kl_horizon": 10000,
    "standardize_scores": "first",
    "score_clip": 5.0,
    "missing_eos_penalty": 1.0,
    "overlong_buffer": 0,
    "log_responses_steps": 2,
    "dtype": "fp32",
    "lora_rank": 0,
    "lora_alpha": 1,
    "lora_learning_rate": None,
    "train_base": "none",
    "critic_lora_rank": 0,
    "critic_lora_alpha": 1,
    "critic_lora_learning_rate": None,
    "template": "dialogue",
    "reward_templates": {"tiny": "dialogue"},
    "llm_judges": {},
}


def make_inputs(folder, tokenizer):
    """Write actor, reward model and tokens; return the inputs of a spec."""
    paths = {
        "actor": folder / "sft",
        "reward": folder / "reward",
        "tokens": folder / "tokens/rlhf",
        "tokens.sft": folder / "tokens/sft",
        "tokens.reward": folder / "tokens/reward",
    }
    init = INIT | {"max_position_embeddings": 96}
    save_model(make_causal(init, tokenizer, seed=1), tokenizer, paths["actor"])
    torch.manual_seed(3)
    scorer = load_scorer(paths["actor"], "fp32", tokenizer, new_head=True)
    save_model(scorer, tokenizer, paths["reward"])
    encoder = Encoder(tokenizer, "dialogue")
    for number, name in enumerate(("tokens", "tokens.sft", "tokens.reward")):
        num_rows = NUM_PROMPTS if name == "tokens" else NUM_PAIRS
        train, held_out = toy.make_rows(num_rows, NUM_PROBES, random.Random(number))
        for split, rows in (("train", train), ("eval", held_out)):
            write_tokens(paths[name], split, rows, encoder)
        stats = {"eval": {"kept_of": {"toy": len(held_out)}}}
        (paths[name] / "stats.json").write_text(json.dumps(stats))
    probes = Examples.read(paths["tokens.reward"], "eval", "chosen", "rejected")
    scores = response_scores(Scorer(scorer).eval(), probes, PLACEMENT["micro_batch_tokens"])
    facts = {"reward": {"probe_scores": scores.tolist()}}
    for name, path in paths.items():
        spec = {"rule": name, "name": "tiny", "path": str(path)}
        spec |= {"settings": {}, "inputs": {}, "files": {}}
        manifest = {"spec": spec, "inputs": {}, "lineage": {}, "files": {}}
        manifest["facts"] = facts.get(name, {})
        manifest_path(path).write_text(json.dumps(manifest))
    inputs = {name: {"path": str(path)} for name, path in paths.items()}
    return inputs | {"ptx": inputs["tokens.sft"]}


def write_tokens(folder, split, rows, encoder):
    folder.mkdir(parents=True, exist_ok=True)
    with open_prompt_texts(folder, split, []) as write:
        prompts = [parse_prompt(row["prompt"]) for row in rows]
        write({"prompt": prompts}, [True] * len(rows))
    for field in ("prompt", "chosen", "rejected"):
        with RaggedWriter(folder, f"{split}.{field}", len(encoder.tokenizer)) as writer:
            if field == "prompt":
                writer.write(encoder.prompts(prompts))
            else:
                writer.write(encoder.responses([row[field] for row in rows]))
