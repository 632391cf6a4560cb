"""The cases of tests/unit/training/test_processes.py, which scripts/launch.py runs in one start.

    worker.py FOLDER [NAME...]

Runs cases, all by default, and writes what they returned to FOLDER/RANK.pt.
"""

import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from snakechat.algorithms.rollouts import Rollouts, sample_on_all_ranks  # noqa: E402
from snakechat.modeling.batching import Examples  # noqa: E402
from snakechat.modeling.forward import Policy  # noqa: E402
from snakechat.modeling.generation import Sampler  # noqa: E402
from snakechat.modeling.loading import add_lora, disable_adapters  # noqa: E402
from snakechat.modeling.saving import write_weights  # noqa: E402
from snakechat.modeling.vllm_sampler import merged_weights  # noqa: E402
from snakechat.training.checkpointing import Checkpointer  # noqa: E402
from snakechat.training.placed_models import init_process_group, make_engine  # noqa: E402
from snakechat.workflow import processes  # noqa: E402
from snakechat.workflow.processes import Placement, RunOptions  # noqa: E402
from support import engines  # noqa: E402
from support.engines import plain_optimizer  # noqa: E402
from support.specs import opt_config  # noqa: E402

SETTINGS = engines.SETTINGS | {"lr_schedule": "linear", "max_grad_norm": 0.5}
PLACEMENT = Placement(nodes=processes.world_size(), micro_batch_tokens=16)
STEPS, ROWS, LENGTH, VOCABULARY = 6, 8, 7, 50
NUM_TOKENS, CPU = ROWS * (LENGTH - 1), torch.device("cpu")
PROMPTS = [list(range(3, 3 + length)) for length in (5, 2, 7, 3, 4)]


def make_model():
    torch.manual_seed(0)
    sizes = {"ffn_dim": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
    config = OPTConfig(**opt_config(2, 16, 2, **sizes, dropout=0.0, init_std=0.3))
    return OPTForCausalLM(config).eval()


def rows_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)


def engine_for(module, placement, settings):
    settings = SimpleNamespace(**{**SETTINGS, **settings})
    return make_engine(module, settings, engines.RATE, STEPS, replace(PLACEMENT, **placement))


def train_step(engine, step):
    """Run one step, with the rows of this rank in two micro-batches; return the global loss."""
    ids, loss_sum = rows_of(step).tolist(), torch.zeros(())
    examples = Examples([row[:1] for row in ids], [row[1:] for row in ids])
    for micro_batch in examples.micro_batches(np.arange(ROWS), True, CPU):
        loss = -micro_batch.counted / NUM_TOKENS * engine(micro_batch.batch, return_sum=True)
        engine.backward(loss, micro_batch.is_last)
        loss_sum += loss.detach().float()
    engine.step()
    return processes.all_reduce_sum(loss_sum).item()


def weights_of(engine):
    return engines.weights_of(engine.module).float()


# --- training -----------------------------------------------------------------------------------


def train(placement, settings=None):
    """Train; return the losses, gradient norms and final weights."""
    engine = engine_for(Policy(make_model()), placement, settings or {})
    run = {"losses": [], "norms": []}
    for step in range(STEPS):
        run["losses"].append(train_step(engine, step))
        run["norms"].append(engine.grad_norm)
    return {**run, "weights": weights_of(engine)}


def train_with_torch():
    """Train with torch alone, on whole batches."""
    model = make_model()
    optimizer = plain_optimizer(model)
    run = {"losses": [], "norms": []}
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = engines.RATE * (1 - step / STEPS)
        optimizer.zero_grad()
        ids = rows_of(step)
        # The mean over all tokens but the first of each row.
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), SETTINGS["max_grad_norm"])
        optimizer.step()
        run["losses"].append(loss.item())
        run["norms"].append(norm.item())
    return run


def train_and_keep(folder, placement, settings=None, act=lambda step: None):
    """Train from the last checkpoint on; return the engine and the losses.

    act: A function to call with each step, before its state is kept.
    """
    job = SimpleNamespace(
        result=folder, states=folder / "states", options=RunOptions(save_steps=3), record={}
    )
    if processes.rank() == 0:
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").touch()
    processes.barrier()
    engine, losses = engine_for(Policy(make_model()), placement, settings or {}), []
    with Checkpointer(job, policy=engine) as checkpointer:
        for step, _ in checkpointer.steps(range(STEPS)):
            losses.append(train_step(engine, step - 1))
            torch.rand(processes.rank() + 1)
            act(step)
            checkpointer.keep(step)
    return engine, losses


def stop_and_resume(folder, placement, settings=None):
    """Train until a signal to the last rank stops all ranks after step 4; then resume."""

    def act(step):
        if step == 4 and processes.rank() == processes.world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        train_and_keep(folder, placement, settings, act)
    except SystemExit as stopped:
        exit_code = stopped.code
    processes.barrier()
    saved = {
        path.name: sorted(file.name for file in path.iterdir())
        for path in (folder / "states").iterdir()
    }
    processes.barrier()
    engine, losses = train_and_keep(folder, placement, settings)
    return {
        "exit_code": exit_code,
        "saved": saved,
        "losses": losses,
        "weights": weights_of(engine),
        "random_number": torch.rand(1).item(),
    }


# --- rollouts -----------------------------------------------------------------------------------


def train_on_rollouts(placement):
    """Sample from adapters, and train them on rollouts.

    Returns the responses and the log-probabilities before each step, and the losses.
    """
    policy, rows = Policy(add_lora(make_model(), 4, 8)), np.arange(len(PROMPTS))
    engine = engine_for(policy, placement, {})
    # A prompt at a time: batches have 16 tokens.
    sampler = Sampler([2], 4, 1.0, 2)
    # Each prompt reversed, and the same without its first token.
    responses = [[prompt[::-1][first:] for prompt in PROMPTS] for first in range(2)]
    # With 16 tokens per micro-batch, one process has three to four of them.
    rollouts = Rollouts(PROMPTS, responses, None, [2], 0.8, CPU)
    run = {"responses": [], "tables": [], "base_tables": [], "losses": []}
    run["mask"] = rollouts.response_mask
    # As a reward function of the first process.
    torch.manual_seed(1 + processes.rank())
    # Two processes have different numbers of prompts.
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS):
        sampler.update(policy.model, engine.gathered)
        run["responses"].append(sample_on_all_ranks(sampler, prompts, engine.sampling)[0])
        run["tables"].append(rollouts.logprobs_and_entropies(policy))
        with disable_adapters(policy.model):
            run["base_tables"].append(rollouts.logprobs(policy))
        num_tokens, loss_sum = rollouts.num_tokens(rows), torch.zeros(())
        for micro_batch, _, _ in rollouts.micro_batches(rows, policy.supports_packing):
            loss = -micro_batch.counted / num_tokens * engine(micro_batch.batch, 0.8).sum()
            engine.backward(loss, micro_batch.is_last)
            loss_sum += loss.detach()
        engine.step()
        run["losses"].append(processes.all_reduce_sum(loss_sum).item())
    return run


def train_and_save(folder, placement, settings):
    """Train adapters and save the merged model; return its weights and the saved weights."""
    policy = Policy(add_lora(make_model(), 4, 8))
    engine = engine_for(policy, placement, settings)
    ids = rows_of(0)
    for _ in range(3):
        rows = Examples([ids[0].tolist()], [ids[1].tolist()])
        batch = rows.collate([[0]], True, ids.device)
        engine.backward(-engine(batch).sum(), last=True)
        engine.step()
    folder.mkdir(exist_ok=True)
    write_weights(policy.model, folder, engine.gathered)
    exact = folder / "fp32"
    exact.mkdir(exist_ok=True)
    write_weights(policy.model, exact, engine.gathered, engine.master)
    processes.barrier()
    with engine.gathered(list(policy.model.parameters())):
        merged = {name: weight.clone() for name, weight in merged_weights(policy.model)}
    saved, in_fp32 = (load_file(path / "model.safetensors") for path in (folder, exact))
    return {"merged": merged, "saved": saved, "in_fp32": in_fp32}


# --- all cases ----------------------------------------------------------------------------------


def all_cases(folder):
    """Return a function for each case, by name."""
    places, bf16 = [{"zero_stage": stage} for stage in range(4)], {"dtype": "bf16"}
    cases = {}
    for stage in range(4):
        cases[f"stage {stage}"] = partial(train, places[stage])
    for offload in ("optimizer", "parameters"):
        cases[f"offload {offload} 3"] = partial(train, {**places[3], "offload": offload})
    for stage in (2, 3):
        cases[f"bf16 {stage}"] = partial(train, places[stage], bf16)
    cases["checkpointing 3"] = partial(train, {**places[3], "activation_checkpointing": True})
    for stage in range(4):
        cases[f"resumed {stage}"] = partial(
            stop_and_resume, folder / f"{stage}", places[stage], bf16 if stage >= 2 else {}
        )
    for stage in (0, 3):
        cases[f"rollouts lora {stage}"] = partial(train_on_rollouts, places[stage])
    for stage, dtype in ((0, "bf16"), (3, "fp32"), (3, "bf16")):
        cases[f"merged {dtype} {stage}"] = partial(
            train_and_save, folder / f"merged-{dtype}-{stage}", places[stage], {"dtype": dtype}
        )
    return cases


def main(folder, names):
    init_process_group(PLACEMENT)
    torch.set_num_threads(1)
    cases = all_cases(folder)
    results = {name: cases[name]() for name in names or cases}
    rank = processes.rank()
    results["first"] = [processes.broadcast_from_first(value) for value in (rank == 0, 7 - rank)]
    if processes.rank() == 0:
        results["torch"] = train_with_torch()
    torch.save(results, folder / f"{processes.rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
