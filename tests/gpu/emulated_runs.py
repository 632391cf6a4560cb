"""What runs on emulated CUDA for test_emulated_cuda.py, in one process, which imports torch once.

    emulated_runs.py FOLDER

Prints two lines of JSON: why a graph cannot have the pass of each model family, or null; and of
each training the waits of the host, the captured decoding steps, the decoders and the error. The
measurements of measure.py write FOLDER/out.jsonl.
"""

import contextlib
import gc
import json
import sys
import traceback
import warnings
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gpu import measure
from gpu.emulated_cuda import DEVICE, emulation, rehearsal
from gpu.workloads import tiny_job, train
from snakechat.modeling import generation
from snakechat.modeling.generation import FixedDecoder, HfSampler
from snakechat.training.metric_logs import StepTimer
from snakechat.workflow import processes

LLAMA = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
LLAMA |= {"pad_token_id": 0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}
EXPERTS = {**LLAMA, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 16}
HEADS = {**LLAMA, "head_dim": 8}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
FAMILIES = {
    "opt": {**LLAMA, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt2": GPT2,
    "gptj": {**GPT2, "rotary_dim": 4},
    "bloom": {**LLAMA, "n_layer": 2, "n_head": 4},
    "falcon": LLAMA,
    "llama": LLAMA,
    "llama, dynamic": {**LLAMA, "rope_parameters": DYNAMIC},
    "qwen3": HEADS,
    "mistral, window": {**LLAMA, "sliding_window": 8},
    "phi3, longrope": {
        **LLAMA,
        "rope_scaling": LONGROPE,
        "original_max_position_embeddings": 32,
    },
    "gemma3_text": {**HEADS, "sliding_window": 8},
    "mixtral": EXPERTS,
    "qwen3_moe": {**EXPERTS, "head_dim": 8},
    "mamba": {**LLAMA, "state_size": 8},
}

STEPS = 3
# Training of workloads.TINY_CASES, and changes of the placement.
CASES = {
    **{name: (name, {}) for name in ("sft", "reward", "dpo", "ppo", "grpo", "gsm8k")},
    "not captured": ("grpo", {"cuda_graphs": False}),
    "zero 2": ("sft", {"zero_stage": 2}),
}


def capture_problem(family, keys):
    """Return why a graph cannot have the pass of a family; None if it can."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.partition(",")[0], **keys)
    model = AutoModelForCausalLM.from_config(config).eval()
    if not generation.takes_dense_mask(model):
        return "takes no mask of four dimensions, or drops tokens"
    with emulation():
        return generation._capture_problem(model.to(DEVICE))


def run_measurements(folder):
    """Run all sections of measure.py, with few of its trainings: `run_training` has the others."""
    measure.TINY_CASES = ("sft", "grpo")
    for name, (section, _) in measure.SECTIONS.items():
        with rehearsal():
            section(measure.Bench(name, folder / "out.jsonl", folder, measure.REHEARSAL))


def run_training(name, folder):
    """Run the unchanged `main` of a trainer; return what test_emulated_cuda.py checks."""
    case, changes = CASES[name]
    with contextlib.ExitStack() as stack:
        counts, captured, decoders, error = stack.enter_context(emulation()), [], [], None
        for owner, attribute, value in (
            (StepTimer, "__call__", timed_phase(StepTimer.__call__, counts)),
            (FixedDecoder, "run_graph", captured_phase(counts, captured)),
            (HfSampler, "fixed_decoder", recorded(HfSampler.fixed_decoder, decoders)),
        ):
            stack.enter_context(mock.patch.object(owner, attribute, value))
        try:
            placement = {"gpus_per_node": 1, **changes}
            job = tiny_job(case, folder, folder / name / "result", "bf16", **placement)
            counts.waits.clear()
            train(job, STEPS)
        except Exception:
            error = traceback.format_exc()
    return {
        "error": error,
        "waits": [[*key, number] for key, number in sorted(counts.waits.items())],
        "captured_steps": len(captured),
        "decoders": len({*map(id, decoders)}),
    }


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
    """Return FixedDecoder.run_graph, whose steps are a phase of the counts and added to a list."""

    def run(decoder):
        before, counts.phase = counts.phase, "captured"
        decoder.sample()
        counts.phase = before
        steps.append(decoder.number)

    return run


def main(folder):
    # Of what the imports made, passes of the collector would take minutes.
    gc.freeze()
    warnings.simplefilter("ignore")
    print(json.dumps({name: capture_problem(name, keys) for name, keys in FAMILIES.items()}))
    run_measurements(folder)
    processes.request_deterministic_kernels()
    trainings = folder / "trainings"
    trainings.mkdir()
    print(json.dumps({name: run_training(name, trainings) for name in CASES}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
