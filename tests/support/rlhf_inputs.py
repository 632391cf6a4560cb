"""The inputs of train_rlhf: small models with random weights, and tokens of the toy dataset."""

import json
import random

import torch

from conftest import INIT
from snakechat.data import toy
from snakechat.data.dialogues import parse_prompt
from snakechat.data.encoder import Encoder
from snakechat.data.prompt_texts import open_prompt_texts
from snakechat.data.ragged_arrays import RaggedWriter
from snakechat.modeling.loading import load_scorer
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from support.configs import load
from support.stages import write_manifest

NUM_PROMPTS, NUM_PAIRS, NUM_PROBES = 240, 64, 16
# The tiny recipe with two steps of two updates each.
SETTINGS = load().program_settings("rlhf", "tiny")
SETTINGS |= {"max_response_length": 8, "epochs": 1, "ppo_epochs": 1, "log_responses_steps": 2}
SETTINGS |= {"rollout_batch_size": 120, "global_batch_size": 60}
SETTINGS |= {"template": "dialogue", "reward_templates": {"reward/tiny": "dialogue"}}


def make_inputs(folder, tokenizer):
    """Write actor, reward model and tokens; return the inputs of a spec."""
    paths = {
        "actor": folder / "sft",
        "teacher": folder / "teacher",
        "reward": folder / "reward",
        "tokens": folder / "tokens/rlhf",
        "ptx": folder / "tokens/sft",
    }
    init = INIT | {"max_position_embeddings": 96}
    for seed, name in enumerate(("actor", "teacher"), 1):
        save_model(make_causal(init, tokenizer, seed=seed), tokenizer, paths[name])
    torch.manual_seed(3)
    scorer = load_scorer(paths["actor"], "fp32", tokenizer, new_head=True)
    save_model(scorer, tokenizer, paths["reward"])
    encoder = Encoder(tokenizer, "dialogue")
    for number, name in enumerate(("tokens", "ptx")):
        num_rows = NUM_PROMPTS if name == "tokens" else NUM_PAIRS
        train, held_out = toy.make_rows(num_rows, NUM_PROBES, random.Random(number))
        for split, rows in (("train", train), ("eval", held_out)):
            write_tokens(paths[name], split, rows, encoder)
        stats = {"eval": {"kept_of": {"toy": len(held_out)}}}
        (paths[name] / "stats.json").write_text(json.dumps(stats))
    for path in paths.values():
        write_manifest(path)
    return {name: {"path": str(path)} for name, path in paths.items()}


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
