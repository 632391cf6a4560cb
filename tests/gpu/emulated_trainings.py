"""Trainings on emulated CUDA: the cases of test_emulated_cuda.py.

Runs the unchanged `main` of trainers on a small model, for three steps, with deterministic kernels.
Prints JSON: for each, the waits of the host, the captured decoding steps, the decoders and the
error.
"""

import contextlib
import json
import traceback
from unittest import mock

from gpu.emulated_cuda import emulation
from gpu.workloads import tiny_job, train
from snakechat.modeling import acceleration
from snakechat.modeling.captured_decoding import FixedDecoder
from snakechat.modeling.generation import HfSampler
from snakechat.training.metric_logs import StepTimer
from snakechat.workflow import processes

STEPS = 3
# Training of workloads.TINY_CASES, and changes of the placement.
CASES = {
    "sft": ("sft", {}),
    "reward": ("reward", {}),
    "dpo": ("dpo", {}),
    "ppo": ("ppo", {}),
    "grpo": ("grpo", {}),
    "gsm8k": ("gsm8k", {}),
    "not captured": ("grpo", {"cuda_graphs": False}),
    "zero 2": ("sft", {"zero_stage": 2}),
}


def main(folder):
    processes.request_deterministic_kernels()
    results = {}
    for name, (case, changes) in CASES.items():
        placement = {"gpus_per_node": 1, **changes}
        with contextlib.ExitStack() as stack:
            counts, captured, decoders = stack.enter_context(emulation()), [], []
            for owner, attribute, value in (
                # torch emulates in the thread that enters the context.
                (acceleration, "prefetched", lambda items: items),
                (StepTimer, "__call__", timed_phase(StepTimer.__call__, counts)),
                (FixedDecoder, "_captured", captured_phase(counts, captured)),
                (HfSampler, "fixed_decoder", recorded(HfSampler.fixed_decoder, decoders)),
            ):
                stack.enter_context(mock.patch.object(owner, attribute, value))
            try:
                job = tiny_job(case, folder, folder / name / "result", "bf16", **placement)
                counts.waits.clear()
                train(job, STEPS)
                error = None
            except Exception:
                error = traceback.format_exc()
        waits = [[*key, number] for key, number in sorted(counts.waits.items())]
        results[name] = {"error": error, "waits": waits, "captured_steps": len(captured)}
        results[name]["decoders"] = len({*map(id, decoders)})
    print(json.dumps(results))


def recorded(get, decoders):
    """Return HfSampler.fixed_decoder, which adds each decoder to a list."""

    def call(*arguments):
        decoders.append(get(*arguments))
        return decoders[-1]

    return call


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
