"""The cases of tests/gpu/test_training.py, which scripts/launch.py runs in one or more processes.

    worker.py DEVICE FOLDER

Trains a small model at each ZeRO stage in each dtype that the device has, once without and once
with an interruption, and writes losses and greedy responses to FOLDER/RANK.json. On a GPU, one
case has compiled layers, and the last one runs again with deterministic kernels.
"""

import copy
import dataclasses
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers import OPTConfig, OPTForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from snakechat.modeling import acceleration  # noqa: E402
from snakechat.modeling.batching import Examples  # noqa: E402
from snakechat.modeling.forward import Policy  # noqa: E402
from snakechat.modeling.generation import sample_responses  # noqa: E402
from snakechat.training.engine import make_engine  # noqa: E402
from snakechat.training.process_group import init_process_group  # noqa: E402
from snakechat.workflow import deterministic, distributed  # noqa: E402
from snakechat.workflow.placement import placement_of  # noqa: E402
from support.engines import SETTINGS  # noqa: E402
from support.specs import opt_config  # noqa: E402

CASES = {"cpu": [(0, "fp32")]}
CASES["cuda"] = [(stage, "fp32") for stage in range(4)]
CASES["cuda"] += [(stage, "bf16") for stage in range(4)] + [(2, "fp16"), (3, "fp16")]
VOCABULARY, STEPS = 96, 4


def make_policy(device):
    """Return a small policy, the same on every device."""
    torch.manual_seed(0)
    sizes = {"ffn_dim": 128, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
    model = OPTForCausalLM(OPTConfig(**opt_config(2, 64, 2, **sizes, dropout=0.0, init_std=0.1)))
    # As snakechat.modeling.loading does.
    model.config._attn_implementation = "sdpa"
    return Policy(model).to(device)


def make_examples():
    """Return 32 prompts with a response each."""
    random = np.random.default_rng(1)
    return Examples(
        *(
            [random.integers(4, VOCABULARY, random.integers(3, 20)).tolist() for _ in range(32)]
            for _ in range(2)
        )
    )


def train_step(engine, examples, step, device):
    """Run a step on 8 rows; return its loss."""
    rows = np.arange(8 * step, 8 * step + 8) % len(examples)
    num_tokens = int(examples.num_tokens(with_prompts=True)[rows].sum())
    loss_sum = torch.zeros((), device=device)
    for micro_batch in examples.micro_batches(rows, True, device, with_prompts=True):
        loss = -micro_batch.counted / num_tokens * engine(micro_batch.batch, return_sum=True)
        engine.backward(loss, micro_batch.is_last)
        loss_sum += loss.detach().float()
    engine.step()
    return distributed.all_reduce_sum(loss_sum).item()


def run(stage, dtype, placement, device, interrupted):
    """Return the losses of all steps, and greedy responses of the trained model."""
    placement = dataclasses.replace(placement, zero_stage=stage)
    settings = SimpleNamespace(**{**SETTINGS, "dtype": dtype})

    def make():
        return make_engine(make_policy(device), settings, 1e-3, STEPS, placement)

    engine, examples, losses = make(), make_examples(), []
    for step in range(STEPS):
        if interrupted and step == STEPS // 2:
            state = copy.deepcopy(engine.state_dict())
            engine = make()
            engine.load_state_dict(state)
        losses.append(train_step(engine, examples, step, device))
    with engine.sampling():
        model = engine.module.model
        [responses] = sample_responses(model, examples.prompts[:4], [0], 12, 0)
    return {"losses": losses, "responses": responses}


def main(device_type, folder):
    # Libraries of a GPU read it once.
    os.environ.update(deterministic.ENVIRONMENT)
    size = distributed.world_size()
    placement = placement_of(
        {"gpus_per_node" if device_type == "cuda" else "nodes": size, "micro_batch_tokens": 128}
    )
    device, results = init_process_group(placement), {}

    def add(stage, dtype, case=""):
        results[f"{stage} {dtype}{case}"] = [
            run(stage, dtype, placement, device, interrupted) for interrupted in (False, True)
        ]

    for stage, dtype in CASES[device_type]:
        add(stage, dtype)
    if device_type == "cuda":
        with acceleration.using(dataclasses.replace(acceleration.current(), compile=True)):
            add(2, "fp32", " compiled")
        acceleration.use_deterministic_kernels(warn_only=False)
        add(stage, dtype, " deterministic")
    (folder / f"{distributed.rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
