"""Peak memory of a process while PPO loads its models, takes two steps and saves the actor.

Arguments: FOLDER, ZeRO stage, hidden size and layers of the models. Writes the bytes above the idle
process as FOLDER/STAGE-RANK.json.
"""

import importlib
import json
import sys
from itertools import islice
from pathlib import Path
from unittest import mock

import torch
from memory_worker import Memory
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.workloads import make_job, small_tokenizer, tokens_folder
from snakechat.modeling.loading import load_scorer
from snakechat.modeling.models import SPECIAL_IDS
from snakechat.modeling.saving import save_model
from snakechat.training.checkpointing import Checkpointer
from snakechat.training.process_group import init_process_group
from snakechat.workflow import distributed

STEPS, ROWS, PROMPT, RESPONSE = 2, 16, 104, 24


def main(folder, stage, hidden, layers):
    placement = {"nodes": distributed.world_size(), "gpus_per_node": 0, "zero_stage": stage}
    placement |= {"micro_batch_tokens": 512}
    sizes = {folder / f"tiny-{stage}": (320, 1), folder / f"large-{stage}": (hidden, layers)}
    jobs = [rlhf_job(inputs, placement) for inputs in sizes]
    init_process_group(jobs[0].placement)
    for inputs, size in sizes.items():
        if distributed.rank() == 0:
            write_models(inputs, *size)
        distributed.barrier()
    tiny, large = jobs
    # The modules that are imported later belong to the idle process.
    train(tiny)
    memory = Memory()
    train(large)
    memory.end_phase("all")
    path = folder / f"{stage}-{distributed.rank()}.json"
    path.write_text(json.dumps({"peaks": memory.peaks}))


def rlhf_job(inputs, placement):
    """Return a job of train_rlhf whose models and tokens are in a folder."""
    own = inputs / f"{distributed.rank()}"
    own.mkdir(parents=True)
    paths = {"actor": inputs / "actor", "reward": inputs / "reward"}
    # Each process has tokens of its own, all the same.
    paths["tokens"] = tokens_folder("tiny-opt", own, STEPS * ROWS, PROMPT + RESPONSE)
    return make_job(
        "rlhf",
        paths,
        own / "result",
        placement,
        dtype="bf16",
        max_prompt_length=PROMPT,
        max_response_length=RESPONSE,
        global_batch_size=ROWS,
        rollout_batch_size=ROWS,
    )


def write_models(folder, hidden, layers):
    """Write an actor and a reward model of a size."""
    tokenizer = small_tokenizer()
    size = {"hidden_size": hidden, "word_embed_proj_dim": hidden, "ffn_dim": 4 * hidden}
    size |= {"num_hidden_layers": layers, "num_attention_heads": hidden // 64, "vocab_size": 1024}
    ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
    config = AutoConfig.for_model("opt", **size, **ids, max_position_embeddings=256, dropout=0.0)
    # In 16 bits: a CPU holds the file's tensors in addition to the model's.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    save_model(model, tokenizer, folder / "actor")
    scorer = load_scorer(folder / "actor", "bf16", tokenizer, new_head=True)
    save_model(scorer, tokenizer, folder / "reward")


def train(job):
    """Take two steps and save the actor."""
    program, steps = importlib.import_module("train_rlhf"), Checkpointer.steps
    with mock.patch.object(Checkpointer, "steps", lambda *each: islice(steps(*each), STEPS)):
        program.main(job)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
