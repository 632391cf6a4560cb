"""What the processes of tests/test_ranks.py do: all cases in one start. Run by scripts/launch.py.

Each case is done twice, and its figures stand in FOLDER/RANK.pt.
"""

import itertools
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import OPTConfig, OPTForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from snakechat.algorithms.rollouts import Rollouts, sample_on_all_ranks  # noqa: E402
from snakechat.algorithms.response_scoring import ResponseScorer  # noqa: E402
from snakechat.modeling.forward import Policy  # noqa: E402
from snakechat.modeling.lora import add_lora, disable_adapters  # noqa: E402
from snakechat.training.checkpointing import Checkpointer  # noqa: E402
from snakechat.training.ema import Ema  # noqa: E402
from snakechat.training.engine import make_engine  # noqa: E402
from snakechat.training.process_group import init_process_group  # noqa: E402
from snakechat.workflow import distributed as ranks  # noqa: E402

SETTINGS = {
    "weight_decay": 0.1,
    "adam_betas": [0.9, 0.95],
    "lr_schedule": "linear",
    "warmup_steps": 0,
    "min_lr_ratio": 0.0,
    "max_grad_norm": 0.5,
    "dtype": "fp32",
}
PLACEMENT = {
    "nodes": ranks.world_size(),
    "gpus_per_node": 0,
    "zero_stage": 0,
    "offload": "none",
    "activation_checkpointing": False,
    "save_steps": 3,
}
STEPS, ROWS, LENGTH, WORDS = 6, 8, 7, 50
PROMPTS = [list(range(3, 3 + length)) for length in (5, 2, 7, 3, 4)]


class Toy(nn.Module):
    """A language model whose pass reads the output layer's weight, which is the embedding's too."""

    def __init__(self, lora=False):
        super().__init__()
        torch.manual_seed(0)
        config = OPTConfig(
            vocab_size=WORDS,
            hidden_size=16,
            word_embed_proj_dim=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=32,
            max_position_embeddings=32,
            dropout=0.0,
            init_std=0.3,
        )
        self.model = OPTForCausalLM(config).eval()
        if lora:
            from peft import LoraConfig, get_peft_model

            targets = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "fc1"])
            self.model = get_peft_model(self.model, targets)

    @property
    def causal(self):
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    def external_parameters(self):
        return [self.causal.get_output_embeddings().weight]

    def forward(self, ids):
        hidden = self.causal.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = functional.linear(hidden[:, :-1], *self.external_parameters()).float()
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def rows_of(step):
    return torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def engine_for(module, placement, settings):
    settings = SimpleNamespace(**{**SETTINGS, **settings})
    return make_engine(module, settings, 0.01, STEPS, {**PLACEMENT, **placement})


def run_step(engine, step):
    """One optimizer step: this process's rows in two passes. Returns the loss of all rows."""
    groups = rows_of(step)[ranks.rank() :: ranks.world_size()].chunk(2)
    tokens, loss_sum = ROWS * (LENGTH - 1), torch.zeros(())
    for number, ids in enumerate(groups, start=1):
        loss = engine(ids) / tokens
        engine.backward(loss, last=number == len(groups))
        loss_sum += loss.detach().float()
    engine.step()
    return ranks.all_reduce_sum(loss_sum).item()


def weights_of(engine):
    with engine.gathered_weights():
        weights = [weight.detach().flatten().clone() for weight in engine.module.parameters()]
        return torch.cat(weights).float()


def train(placement, settings=None, lora=False):
    """A whole run: its losses, norms and rates, and the weights at the end."""
    engine = engine_for(Toy(lora), placement, settings or {})
    found = {"losses": [], "norms": [], "rates": []}
    for step in range(STEPS):
        found["rates"].append([group["lr"] for group in engine.optimizer.param_groups])
        found["losses"].append(run_step(engine, step))
        found["norms"].append(engine.grad_norm)
    return {**found, "weights": weights_of(engine)}


def plain():
    """The same by torch alone, on whole batches."""
    module = Toy().train()
    groups = [
        {"params": [w for w in module.parameters() if w.ndim > 1], "weight_decay": 0.1},
        {"params": [w for w in module.parameters() if w.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    found = {"losses": [], "norms": []}
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 - step / STEPS)
        optimizer.zero_grad()
        loss = module(rows_of(step)) / (ROWS * (LENGTH - 1))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), SETTINGS["max_grad_norm"])
        optimizer.step()
        found["losses"].append(loss.item())
        found["norms"].append(norm.item())
    weights = [weight.detach().flatten() for weight in module.parameters()]
    return {**found, "weights": torch.cat(weights)}


def resumed(folder, placement, settings=None):
    """A run that a signal to the last process alone stopped: its end, and how it was told."""
    job = SimpleNamespace(
        result=folder, states=folder / "states", placement={**PLACEMENT, **placement}, record={}
    )
    if ranks.rank() == 0:
        folder.mkdir()
        (folder / "metrics.jsonl").touch()
    ranks.barrier()

    def go(stop_at=None):
        engine, losses = engine_for(Toy(), placement, settings or {}), []
        for step, _ in Checkpointer(job, policy=engine).steps(range(STEPS)):
            losses.append(run_step(engine, step - 1))
            torch.rand(ranks.rank() + 1)
            if step == stop_at and ranks.rank() == ranks.world_size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return engine, losses

    try:
        go(stop_at=4)
    except SystemExit as stopped:
        said = stopped.code
    ranks.barrier()
    saved = {
        path.name: sorted(part.name for part in path.iterdir()) for path in job.states.iterdir()
    }
    ranks.barrier()
    engine, losses = go()
    return {
        "said": said,
        "saved": saved,
        "losses": losses,
        "weights": weights_of(engine),
        "drawn": torch.rand(1).item(),
    }


def generated():
    """Whole weights in between: other numbers of passes in each process, then training goes on."""
    engine = engine_for(Toy(), {"zero_stage": 3, "activation_checkpointing": True}, {})
    responses = []
    for step in range(3):
        run_step(engine, step)
        with engine.gathered_weights():
            ids = rows_of(9)[:2, :3]
            responses.append(
                engine.module.causal.generate(
                    ids, max_new_tokens=3 + 4 * ranks.rank(), do_sample=False
                )
            )
    return {"responses": [response[:, :6] for response in responses], "loss": run_step(engine, 3)}


class Sampler:
    """Responses a prompt backwards, the second time without its end; probabilities tell the ids."""

    def __init__(self):
        self.asked = []

    def sample(self, prompts):
        self.asked.append(len(prompts))
        responses = [[prompt[::-1][first:] for prompt in prompts] for first in range(2)]
        return responses, [[[-number / 8 for number in ids] for ids in row] for row in responses]


def asked(prompts):
    """Who was asked for how many responses, and what all have then."""
    sampler = Sampler()
    settings = SimpleNamespace(num_generations=2, max_response_length=8, generation_backend="vllm")
    responses, logprobs = sample_on_all_ranks(sampler, prompts, settings)
    return {"asked": sampler.asked, "responses": responses, "logprobs": logprobs}


def scored():
    """Scores of a function, and how often it was asked."""
    calls = []

    def length(prompts, responses):
        calls.append(prompts)
        return [len(response) for response in responses]

    rollouts = SimpleNamespace(
        ended=torch.ones(3, dtype=torch.bool),
        device=torch.device("cpu"),
        decode=lambda: (["p", "q", "r"], ["a", "bb", "ccc"]),
    )
    scorer = ResponseScorer(SimpleNamespace(reward_functions={"length": 1}), None, length)
    return {"scores": scorer.score(rollouts, 1, [0, 1, 2]).tolist(), "calls": len(calls)}


def looked_at(placement, lora=False):
    """What a policy in training says of responses before each step, and its losses on them."""
    policy, rows = Policy(Toy().model), np.arange(len(PROMPTS))
    if lora:
        add_lora(policy.model, 4, 8)
    engine = engine_for(policy, placement, {"lora_learning_rate": None})
    responses, _ = Sampler().sample(PROMPTS)
    tokenizer = SimpleNamespace(eos_token_id=2)
    # Three to four passes in one process.
    rollouts = Rollouts(PROMPTS, responses, tokenizer, 0.8, 16, torch.device("cpu"))
    found = {"tables": [], "bare": [], "losses": [], "mask": rollouts.response_mask}
    for _ in range(3):
        found["tables"].append(rollouts.logprobs_and_entropies(policy))
        if lora:
            with disable_adapters(policy.model):
                found["bare"].append(rollouts.logprobs(policy))
        loss_sum = torch.zeros(())
        for micro_batch, _, _ in rollouts.micro_batches(rows, policy.supports_packing):
            loss = -micro_batch.counted / rollouts.num_tokens(rows) * engine(micro_batch.batch, 0.8).sum()
            engine.backward(loss, micro_batch.is_last)
            loss_sum += loss.detach()
        engine.step()
        found["losses"].append(ranks.all_reduce_sum(loss_sum).item())
    return found


def averaged(placement):
    """Losses of a run, and the weights and their averages after each step."""
    engine = engine_for(Toy(), placement, {})
    ema, found = Ema(engine, 0.75), {"losses": [], "weights": [weights_of(engine)], "averages": []}
    for step in range(STEPS):
        found["losses"].append(run_step(engine, step))
        ema.update()
        found["weights"].append(weights_of(engine))
        with ema.average_weights():
            found["averages"].append(weights_of(engine))
    return found


def told():
    """What the processes tell each other."""
    mine = ranks.rank()
    return {
        "total": ranks.all_reduce_sum(torch.tensor([1.0, mine])).tolist(),
        "largest": [ranks.all_reduce_max(10 * mine), ranks.all_reduce_max(mine == 1), ranks.all_reduce_max(-0.5 * mine)],
        "first": [
            ranks.broadcast_from_first(mine == 0),
            ranks.broadcast_from_first(7 - mine),
            ranks.broadcast_from_first(mine + 0.1),
        ],
    }


def main(folder):
    init_process_group(PLACEMENT)
    torch.set_num_threads(1)
    runs = itertools.count()
    cases = {"told": told, "generated": generated, "scored": scored}
    cases |= {"asked": lambda: asked(PROMPTS), "asked one": lambda: asked(PROMPTS[:1])}
    for stage in range(4):
        cases[f"stage {stage}"] = lambda stage=stage: train({"zero_stage": stage})
    for stage, offload in ((1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "parameters")):
        place = {"zero_stage": stage, "offload": offload}
        cases[f"{offload} {stage}"] = lambda p=place: train(p)
    for offload in ("none", "optimizer"):
        place = {"zero_stage": 2, "offload": offload}
        cases[f"bf16 {offload}"] = lambda p=place: train(p, {"dtype": "bf16"})
    cases["bf16 whole"] = lambda: train({"zero_stage": 0}, {"dtype": "bf16"})
    for stage in (0, 3):
        place = {"zero_stage": stage, "activation_checkpointing": True}
        cases[f"checkpointing {stage}"] = lambda p=place: train(p)
    for stage in (0, 2, 3):
        place = {"zero_stage": stage, "activation_checkpointing": stage > 0}
        cases[f"lora {stage}"] = lambda p=place: train(p, {"lora_learning_rate": 0.02}, lora=True)
    for stage in (0, 2, 3):
        kind = {"dtype": "bf16"} if stage == 2 else {}
        place = {"zero_stage": stage}
        cases[f"resumed {stage}"] = lambda p=place, k=kind: resumed(folder / f"{next(runs)}", p, k)
    for stage in (0, 2, 3):
        place = {"zero_stage": stage, "activation_checkpointing": stage == 2}
        cases[f"looked at {stage}"] = lambda p=place: looked_at(p)
        cases[f"bare {stage}"] = lambda p=place: looked_at(p, lora=True)
        cases[f"averaged {stage}"] = lambda p=place: averaged(p)
    found = {name: [case(), case()] for name, case in cases.items()}
    if ranks.rank() == 0:
        found["plain"] = plain()
    torch.save(found, folder / f"{ranks.rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
