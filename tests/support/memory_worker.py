"""Peak memory of a process while it evaluates, loads, trains, samples from and saves a model.

Arguments: FOLDER of the model, ZeRO stage, dtype, LoRA rank (0: none). Writes FOLDER/saved-STAGE
and the bytes of each phase above the idle process as FOLDER/STAGE-RANK.json.
"""

import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from snakechat.modeling.batching import Examples  # noqa: E402
from snakechat.modeling.forward import Policy, response_logprobs  # noqa: E402
from snakechat.modeling.generation import sample_responses  # noqa: E402
from snakechat.modeling.loading import load_causal  # noqa: E402
from snakechat.modeling.lora import add_lora  # noqa: E402
from snakechat.modeling.packing import collate  # noqa: E402
from snakechat.modeling.saving import save_model  # noqa: E402
from snakechat.training.engine import make_engine  # noqa: E402
from snakechat.training.evaluated_models import loaded_policy  # noqa: E402
from snakechat.training.process_group import init_process_group  # noqa: E402
from snakechat.workflow import distributed  # noqa: E402
from snakechat.workflow.placement import placement_of  # noqa: E402

SETTINGS = {
    "weight_decay": 0.1,
    "adam_betas": [0.9, 0.95],
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "min_lr_ratio": 0.0,
    "max_grad_norm": 1.0,
    "lora_learning_rate": None,
}
LENGTH, STEPS = 48, 2


class Memory:
    """Peaks of the memory of this process by phase, in bytes above the idle process."""

    def __init__(self):
        self.peaks = {}
        # The kernel records the peak of the resident memory, without what is swapped out.
        self.with_swap = 0
        threading.Thread(target=self.watch, daemon=True).start()
        self.idle = self.pop_peak()

    def watch(self):
        while True:
            memory = memory_status()
            self.with_swap = max(self.with_swap, memory["VmRSS"] + memory["VmSwap"])
            time.sleep(0.02)

    def pop_peak(self):
        """Return the peak since the last call."""
        peak = max(memory_status()["VmHWM"], self.with_swap)
        # Resets VmHWM to the memory of now.
        Path("/proc/self/clear_refs").write_text("5")
        self.with_swap = 0
        return peak

    def end_phase(self, name):
        self.peaks[name] = self.pop_peak() - self.idle
        gc.collect()
        self.pop_peak()
        self.peaks["resident"] = self.pop_peak() - self.idle


def memory_status():
    """Return the bytes of each kind of this process's memory."""
    rows = (row.split() for row in Path("/proc/self/status").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if row[-1] == "kB"}


def main(folder, stage, dtype, lora_rank):
    placement = placement_of({"nodes": distributed.world_size(), "zero_stage": stage})
    settings = SimpleNamespace(**SETTINGS, dtype=dtype)
    init_process_group(placement)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # The modules that are imported later belong to the idle process.
    warm_up(folder.parent / "tiny", tokenizer, settings, placement)
    memory = Memory()

    if not lora_rank:
        # As evaluations do with several models.
        for _ in range(2):
            evaluate(folder, dtype, tokenizer, placement)
        memory.end_phase("evaluate")
        memory.peaks["evaluated"] = memory.peaks["resident"]

    torch.manual_seed(0)
    model = load_causal(folder, dtype, tokenizer, deferred=stage == 3)
    if lora_rank:
        model = add_lora(model, lora_rank, 2 * lora_rank)
    policy = Policy(model)
    engine = make_engine(policy, settings, 1e-3, STEPS, placement)
    memory.end_phase("load")

    losses = train(engine)
    memory.end_phase("train")

    sample(engine.module, engine.sampling)
    memory.end_phase("sample")

    saved = folder / f"saved-{stage}"
    save_model(model, tokenizer, saved, engine.gathered)
    memory.end_phase("save")

    result = {"peaks": memory.peaks, "losses": losses}
    (folder / f"{stage}-{distributed.rank()}.json").write_text(json.dumps(result))


def warm_up(folder, tokenizer, settings, placement):
    """Do everything once with a tiny model."""
    model = load_causal(folder, settings.dtype, tokenizer, deferred=placement.zero_stage == 3)
    engine = make_engine(Policy(add_lora(model, 1, 1)), settings, 1e-3, STEPS, placement)
    train(engine)
    sample(engine.module, engine.sampling)
    evaluate(folder, settings.dtype, tokenizer, placement)
    with torch.no_grad():
        save_model(model, tokenizer, folder / f"saved-{os.getpid()}", engine.gathered)


def train(engine):
    """Run steps on four sequences, divided over the processes; return the losses."""
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(5, 200, (4, LENGTH), generator=generator)
        own = rows[distributed.rank() :: distributed.world_size()]
        loss_sum = torch.zeros(())
        for number, ids in enumerate(own.tolist(), start=1):
            batch = collate([[(ids[:8], [ids[8:]])]], True, rows.device)
            loss = -engine(batch, return_sum=True) / rows.numel()
            engine.backward(loss, last=number == len(own))
            loss_sum += loss.detach()
        engine.step()
        losses.append(distributed.all_reduce_sum(loss_sum).item())
    return losses


def evaluate(folder, dtype, tokenizer, placement):
    """Sample from a model, and evaluate log-probabilities."""
    rows = [list(range(5, 5 + LENGTH))] * 4
    examples = Examples(rows, rows)
    with loaded_policy(folder, dtype, tokenizer, placement, examples, samples=True) as model:
        sample(model.module, model.sampling)
        response_logprobs(model.module, examples, 2 * LENGTH)


def sample(policy, sampling):
    """Sample a response to each of four prompts, divided over the processes.

    sampling: Returns the context in which the processes call the model.
    """
    prompts = [[5, 6, 7, number] for number in range(8, 12)]
    own = prompts[distributed.rank() :: distributed.world_size()]
    with sampling():
        sample_responses(policy.model, own, [0], 4, 1.0, 1024)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
