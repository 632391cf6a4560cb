"""Trainings on emulated CUDA: the cases of test_emulated_cuda.py.

    emulated_trainings.py GUARD FOLDER NAME...

Runs the unchanged `main` of trainers on a small model, for three steps, with deterministic kernels.
For each, writes the waits of the host, the number of captured decoding steps and the error, if any,
to FOLDER/NAME.json.
"""

import contextlib
import json
import random
import sys
import traceback
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
for folder in ("tests", "scripts"):
    sys.path.insert(0, str(ROOT / folder))

from gpu.guard import load_guard  # noqa: E402

STEPS, ROWS = 3, 24
COMMON = {"datasets": ["toy"], "epochs": 1, "warmup_steps": 0, "dtype": "bf16"}
COMMON["placement"] = {"deployment": "cpu"}
ON_TEXTS = {**COMMON, "model": "random", "max_length": 64, "global_batch_size": 8}
ON_TEXTS |= {"learning_rate": 1e-3}
ON_PROMPTS = {
    **COMMON,
    "actor": "plain",
    "max_prompt_length": 64,
    "max_response_length": 24,
    "rollout_batch_size": 8,
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-3,
}
RECIPES = {
    "sft": {"plain": ON_TEXTS},
    "reward": {"plain": ON_TEXTS},
    "dpo": {"plain": ON_TEXTS},
    "rlhf": {
        "ppo": {**ON_PROMPTS, "reward": "plain", "global_batch_size": 8},
        "grpo": {
            **ON_PROMPTS,
            "algorithm": "grpo",
            "reward": "plain",
            "num_generations": 4,
            "global_batch_size": 32,
        },
    },
}
# Several micro-batches a step; one batch that samples, because the GPU has memory for it.
PLACEMENT = {"gpus_per_node": 1, "micro_batch_tokens": 128, "prefetch": False}
# Rule, recipe, and changes of the placement.
CASES = {
    "sft": ("train_sft", "plain", {}),
    "reward": ("train_reward", "plain", {}),
    "dpo": ("train_dpo", "plain", {}),
    "ppo": ("train_rlhf", "ppo", {}),
    "grpo": ("train_rlhf", "grpo", {}),
    "not captured": ("train_rlhf", "grpo", {"cuda_graphs": False}),
    "zero 2": ("train_sft", "plain", {"zero_stage": 2}),
}


def main(guard, folder, *names):
    load_guard(guard)
    # After the guard: these import torch.
    from gpu.emulated_cuda import emulation
    from init_model import train_tokenizer
    from snakechat.data import toy
    from snakechat.modeling.fixed_decoding import FixedDecoder
    from snakechat.training.metrics import StepTimer
    from snakechat.workflow import deterministic
    from support.stages import stages_of_small_model

    rows, _ = toy.make_rows(ROWS, 0, random.Random(1))
    tokenizer = train_tokenizer((text for row in rows for text in row.values()), 300)
    records = [tuple(row.values()) for row in rows]
    splits = {"train": records, "eval": records[:4]}
    (folder / "work").mkdir()
    with stages_of_small_model(
        folder / "work", tokenizer, splits, RECIPES, max_position_embeddings=128
    ) as stages:
        # Inputs are made on the CPU.
        for name in names:
            rule, recipe, _ = CASES[name]
            for job in stages.describe(rule, recipe)[3].values():
                stages.result(*job)
        placement_on_cpu = stages.placement
        deterministic.request_deterministic_kernels()
        for name in names:
            rule, recipe, changes = CASES[name]
            placement = {**placement_on_cpu(rule, recipe), **PLACEMENT, **changes}
            stages.placement = lambda *_, placement=placement: placement
            with contextlib.ExitStack() as stack:
                counts, captured = stack.enter_context(emulation()), []
                for owner, attribute, value in (
                    (StepTimer, "__call__", timed_phase(StepTimer.__call__, counts)),
                    (FixedDecoder, "_captured", captured_phase(counts, captured)),
                ):
                    stack.enter_context(mock.patch.object(owner, attribute, value))
                try:
                    stages.run(rule, recipe)
                    error = None
                except Exception:
                    error = traceback.format_exc()
            waits = [[*key, number] for key, number in sorted(counts.waits.items())]
            result = {"error": error, "waits": waits, "captured_steps": len(captured)}
            (folder / f"{name}.json").write_text(json.dumps(result, indent=1))


def timed_phase(measured, counts):
    """Return StepTimer.__call__ whose sections are the phases of the counts."""

    @contextlib.contextmanager
    def section(timer, name):
        before, counts.phase = counts.phase, name
        with measured(timer, name):
            yield
        counts.phase = before

    return section


def captured_phase(counts, steps):
    """Return FixedDecoder._captured, whose steps are a phase of the counts and added to a list."""

    def captured(decoder, step):
        def counted():
            before, counts.phase = counts.phase, "captured"
            step()
            counts.phase = before
            steps.append(step)

        return counted

    return captured


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
