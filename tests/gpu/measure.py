"""Check and measure training on one GPU, in nine minutes at most.

    python tests/gpu/measure.py OUT.jsonl [SECTION...]

Needs this checkout and a Python with torch (CUDA), transformers, peft and pyarrow: no network, no
Snakemake, no data, no model. Each section is a process with a time limit of its own, and all
together take at most BUDGET seconds. A line of JSON is appended to OUT.jsonl for each result as
soon as it exists, so that a failure costs no other result. The exit code is 1 if a section failed.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import types
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
for name in ("tests", "scripts"):
    sys.path.insert(0, str(ROOT / name))
if not importlib.util.find_spec("tensorboard"):
    # The logs of trainers, which nobody reads here.
    silent = types.SimpleNamespace(SummaryWriter=mock.MagicMock)
    sys.modules["torch.utils.tensorboard"] = silent

import torch  # noqa: E402

from gpu.workloads import (  # noqa: E402
    GRPO,
    SHAPES,
    TINY_CASES,
    configured,
    make_job,
    make_model,
    metrics,
    model_folder,
    now,
    tiny_job,
    tokens_folder,
    train,
    write_reference,
)
from snakechat.config import recipes  # noqa: E402
from snakechat.estimates.flops import Gpu, flops_per_token, peak_flops  # noqa: E402
from snakechat.estimates.job_estimate import JobEstimate  # noqa: E402
from snakechat.jobs.model_jobs import FIELDS  # noqa: E402
from snakechat.jobs.rules import RULES  # noqa: E402
from snakechat.modeling import attention, models  # noqa: E402
from snakechat.modeling.batching import Examples, training_batches  # noqa: E402
from snakechat.modeling.forward import Policy, response_logprobs  # noqa: E402
from snakechat.modeling.generation import Sampler  # noqa: E402
from snakechat.training.metrics import StepTimer  # noqa: E402
from snakechat.workflow import processes  # noqa: E402

SECTIONS = {}
# Seconds of all sections together.
BUDGET = 540
# The section of a step in which each phase of an estimate is.
PHASES = {"sampling": "generate", "scoring": "score", "training": "train"}


class Size(NamedTuple):
    """Sizes of the measurements.

    large, chat: Models of DeepSpeed-Chat, and one with grouped heads and rotary positions.
    long_response: Tokens of a response of GRPO.
    memory_steps: Steps of GRPO after which memory is recorded.
    """

    large: str
    scorer: str
    chat: str
    rows: int
    limit: int
    micro_batch_tokens: int
    warm_up: int
    steps: int
    responses: int
    response_length: int
    long_response: int
    memory_steps: tuple[int, ...]


GPU = Size("opt-1.3b", "opt-350m", "qwen3-0.6b", 64, 512, 16384, 2, 6, 128, 256, 1024, (2, 8, 20))
REHEARSAL = Size("tiny-opt", "tiny-opt", "tiny-qwen3", 8, 64, 256, 1, 1, 8, 16, 16, (1, 2))


def section(seconds):
    """Return a decorator that adds a function to SECTIONS, with its time limit."""

    def add(function):
        SECTIONS[function.__name__] = (function, seconds)
        return function

    return add


class Bench:
    """What the functions of sections share.

    Attributes:
        size: Sizes of the models and rows.
        folder: Models and tokens, which the first section that needs them makes.
    """

    def __init__(self, name, out, folder, size=GPU):
        self.name, self.out, self.folder, self.size = name, out, folder, size

    def record(self, **result):
        """Append a result."""
        with self.out.open("a") as file:
            file.write(json.dumps({"section": self.name, **result}) + "\n")
        print(f"{self.name}: {result}", flush=True)

    def work(self):
        """Return a new folder for a job."""
        return Path(tempfile.mkdtemp(dir=self.folder)) / "result"


# --- sections ---------------------------------------------------------------------------------


@section(30)
def versions(bench):
    """Record the versions of libraries, and which kernels they lack."""
    names = ("transformers", "peft", "pyarrow", "numpy", "triton", "deepspeed", "vllm")
    found = {name: version(name) for name in ("torch", *names)}
    capability = torch.cuda.get_device_capability()
    kernels = {
        "FlashAttention": attention.supports_varlen(torch.device("cuda"), torch.bfloat16, 64),
        "varlen_attn with enable_gqa": attention.HAS_ENABLE_GQA,
        "compiled layers": models.can_compile(),
    }
    bench.record(
        device=torch.cuda.get_device_name(),
        capability=".".join(map(str, capability)),
        memory_gib=round(torch.cuda.mem_get_info()[1] / 2**30, 1),
        cuda=torch.version.cuda,
        python=platform.python_version(),
        missing=[name for name, has in kernels.items() if not has],
        **found,
    )


@section(90)
def decoding(bench):
    """Measure sampling of the chat model: eager, and captured for the first and a second time."""
    size = bench.size
    model = make_model(size.chat, "cuda").eval()
    vocab_size = SHAPES[size.chat]["vocab_size"]
    prompts = torch.randint(10, vocab_size, (size.responses, size.response_length // 4)).tolist()
    for name, graphs in (("captured", True), ("captured again", True), ("eager", False)):
        torch.cuda.reset_peak_memory_stats()
        with configured(cuda_graphs=graphs):
            started = now()
            sampler = Sampler([2], size.response_length, 1.0)
            sampler.update(model)
            responses, _ = sampler.sample(prompts, range(len(prompts)))
            seconds = now() - started
        sampled = sum(len(ids) for row in responses for ids in row)
        bench.record(
            case=name,
            tokens=sampled,
            tokens_per_second=round(sampled / seconds),
            milliseconds_per_step=round(1000 * seconds / size.response_length, 2),
            peak_gib=gib(torch.cuda.max_memory_allocated()),
        )


@section(200)
def sft(bench):
    """Measure SFT and DPO: speed, and memory beside the estimate."""
    size = bench.size
    for name, stage, model, settings, placement in (
        ("default", "sft", size.large, {}, {}),
        ("grouped heads", "sft", size.chat, {}, {}),
        ("lora", "sft", size.chat, {"lora_rank": 16}, {}),
        ("dpo", "dpo", size.chat, {}, {}),
        ("compiled", "sft", size.large, {}, {"compile": True}),
        ("sdpa", "sft", size.large, {}, {"attn_implementation": "sdpa"}),
        ("activation checkpointing", "sft", size.large, {}, {"activation_checkpointing": True}),
    ):
        number = size.rows * (size.warm_up + size.steps + 1)
        inputs = {
            "model": model_folder(model, bench.folder, "cuda"),
            "tokens": tokens_folder(model, bench.folder, number, size.limit),
        }
        common = {"max_length": size.limit, "global_batch_size": size.rows, "epochs": 1}
        fixed = {"gpus_per_node": 1, "micro_batch_tokens": size.micro_batch_tokens}
        job = make_job(
            stage, inputs, bench.work(), fixed | placement, **common | settings, dtype="bf16"
        )
        if stage == "dpo":
            job.inputs["reference"] = job.result.with_name("reference")
            write_reference(job)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        seconds, tokens, flops = step_means(bench, job)
        peak = peak_flops(torch.cuda.get_device_name())
        bench.record(
            case=name,
            tokens_per_second=round(tokens / seconds),
            seconds_per_step=round(seconds, 4),
            mfu=peak and round(flops / seconds / peak, 3),
            peak_gib=gib(torch.cuda.max_memory_allocated()),
            **estimated(job),
        )


@section(120)
def ppo(bench):
    """Measure steps of PPO of the large model by section."""
    size, rows = bench.size, bench.size.rows
    batches = {"rollout_batch_size": rows, "global_batch_size": rows}
    batches["max_response_length"] = size.response_length
    rlhf_steps(bench, size.large, size.warm_up + size.steps, **batches)


@section(150)
def grpo(bench, last=-1, **settings):
    """Measure steps of GRPO with eight long responses to a prompt, up to one of memory_steps."""
    settings |= {"num_generations": 8, "rollout_batch_size": 1, "global_batch_size": 8}
    settings["max_response_length"] = bench.size.long_response
    number = bench.size.memory_steps[last]
    rlhf_steps(bench, bench.size.chat, number, **GRPO | settings)


@section(120)
def vllm(bench):
    """Measure steps of GRPO that vLLM samples, where it is installed."""
    if version("vllm") is None:
        bench.record(skipped="vllm is not installed")
    else:
        grpo(bench, 1, generation_backend="vllm")


@section(150)
def trainers(bench):
    """Train small models for three steps: in fp32 on a CPU and on the GPU, and twice the same."""

    def tiny_metrics(name, dtype, gpus):
        job = tiny_job(name, bench.folder, bench.work(), dtype, gpus_per_node=gpus)
        train(job, 3)
        return metrics(job)

    for name in TINY_CASES:
        found = [tiny_metrics(name, "fp32", gpus) for gpus in (0, 1)]
        bench.record(case=name, steps=found[1][-1]["step"], **largest_difference(*found))
    model = make_model(bench.size.chat, "cpu").eval()
    policy, rows = Policy(model), tokens_folder(bench.size.chat, bench.folder, 4, bench.size.limit)
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        limit = bench.size.micro_batch_tokens
        with configured(gpus=device == "cuda", micro_batch_tokens=limit):
            policy.to(device, dtype)
            examples = Examples.read(rows, "train", "chosen")
            found.append(response_logprobs(policy, examples).mean())
    bench.record(case="bf16", largest_difference=abs(found[1] / found[0] - 1), of="loss")
    processes.request_deterministic_kernels()
    for name in ("sft", "grpo"):
        twice = [tiny_metrics(name, "bf16", 1) for _ in range(2)]
        bench.record(case=f"{name} twice", is_same=twice[0] == twice[1])


# --- figures ----------------------------------------------------------------------------------


def version(name):
    """Return the version of a library, None if it is missing."""
    try:
        return importlib.import_module(name).__version__
    except ImportError:
        return None


def gib(number):
    return round(number / 2**30, 2)


def largest_difference(expected, steps):
    """Return the loss or norm of a run that differs the most from another one, and by how much.

    Rounding makes shares jump, such as the share of ties or of clipped tokens.
    """
    differences = [
        (abs(step[name] - other[name]) / max(abs(other[name]), 1e-3), name)
        for step, other in zip(steps, expected, strict=True)
        for name in step
        if name.endswith(("loss", "grad_norm"))
    ]
    difference, name = max(differences)
    return {"largest_difference": difference, "of": name}


def rlhf_steps(bench, model, number, **settings):
    """Record the seconds of steps of RLHF by section, and peaks of memory beside the estimate."""
    size = bench.size
    inputs = {
        "actor": model_folder(model, bench.folder, "cuda"),
        "reward": model_folder(size.scorer, bench.folder, "cuda", scorer=True),
        "tokens": tokens_folder(model, bench.folder, size.rows * (number + 1), size.limit),
    }
    fixed = {"gpus_per_node": 1, "micro_batch_tokens": size.micro_batch_tokens}
    common = {"max_prompt_length": size.limit * 5 // 8, "lora_rank": 0, "epochs": 1}
    job = make_job("rlhf", inputs, bench.work(), fixed, **common | settings, dtype="bf16")
    peaks, after, measured = {}, [], StepTimer.__call__

    @contextlib.contextmanager
    def section(timer, name):
        torch.cuda.reset_peak_memory_stats()
        with measured(timer, name):
            yield
        peaks[name] = max(peaks.get(name, 0), torch.cuda.max_memory_allocated())
        if name == "train":
            after.append(torch.cuda.memory_allocated())

    with mock.patch.object(StepTimer, "__call__", section):
        train(job, number)
    lines = map(json.loads, (job.log_folder / "times.jsonl").read_text().splitlines())
    steps = list(lines)[size.warm_up :]
    names = [name for name, value in steps[0].items() if isinstance(value, float)]
    estimate = estimated(job)
    bench.record(
        **{name: round(statistics.median(step[name] for step in steps), 4) for name in names},
        peak_gib=gib(max(peaks.values())),
        peak_gib_of_phase=gib(peaks[PHASES[estimate["phase"]]]),
        gib_after_steps={
            step: gib(after[step - 1]) for step in size.memory_steps if step <= number
        },
        vllm_asleep_gb=job.record.get("vllm_asleep_gb"),
        **estimate,
    )


def step_means(bench, job):
    """Train; return the mean seconds, tokens and operations of the measured steps."""
    size = bench.size
    ends = train(job, size.warm_up + size.steps)
    seconds = statistics.fmean(end - start for start, end in pairwise(ends[size.warm_up - 1 :]))
    # With the tokens of prompts, which the log of a training does not count.
    fields = ["chosen", "rejected"] if job.spec["rule"] == "train_dpo" else ["chosen"]
    examples = Examples.read(job.inputs["tokens"], "train", *fields)
    lengths = examples.prompt_lengths + examples.response_lengths.sum(axis=0)
    batches = training_batches(len(examples), job.settings.global_batch_size, job.settings)
    rows = batches[size.warm_up : len(ends)]
    tokens, targets = (
        statistics.fmean(int(each[batch].sum()) for batch in rows)
        for each in (lengths, examples.num_tokens(with_prompts=False))
    )
    [model] = job.record["models"].values()
    flops = tokens * flops_per_token([(model, 0, 1)], tokens / job.settings.global_batch_size)
    # Without output layers that no token reaches.
    keys = json.loads((job.inputs["model"] / "config.json").read_text())
    of_token = 6 * keys["vocab_size"] * keys["hidden_size"]
    return seconds, tokens, flops - of_token * (tokens - targets)


def planned(rule, settings, **others):
    """Return what an estimate reads of a job that is planned."""
    description = types.SimpleNamespace(settings=settings)
    return types.SimpleNamespace(
        rule=rule, name="random", description=description, is_stale=False, **others
    )


def estimated(job):
    """Return the phase and the peak that scripts/estimate.py predicts for a job."""
    inputs, rule = {}, job.spec["rule"]
    for key, entry in job.spec["inputs"].items():
        stage = entry["rule"].removeprefix("tokenize_")
        # Any model's folder has a config.
        settings = {"fields": FIELDS[recipes.PHASES[stage]]} if stage in recipes.PHASES else {}
        options = {"path": entry["path"], "options": processes.DEFAULTS}
        inputs[key] = planned("fetch_model", settings, **options)
    placed = {"row": RULES[rule], "placement": job.placement, "inputs": inputs}
    gpu = Gpu(torch.cuda.mem_get_info()[1], 1, 1)
    estimate = JobEstimate(planned(rule, job.spec["settings"], **placed), gpu)
    return {"phase": estimate.moment, "estimated_gib": gib(estimate.memory.total())}


# --- processes --------------------------------------------------------------------------------


def main():
    """Run each section in a process, and report those that failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="file to which results are appended")
    parser.add_argument("sections", nargs="*", help=f"default: {' '.join(SECTIONS)}")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = set(arguments.sections) - SECTIONS.keys()
    if unknown:
        sys.exit(f"unknown sections: {', '.join(unknown)}: choose from {', '.join(SECTIONS)}")
    if arguments.run:
        [name] = arguments.sections
        SECTIONS[name][0](Bench(name, arguments.out, arguments.run))
        return
    failed, ends = [], time.monotonic() + BUDGET
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.sections or SECTIONS:
            left = ends - time.monotonic()
            if problem := run_process(name, arguments.out, folder, left):
                failed.append(name)
                Bench(name, arguments.out, Path(folder)).record(failed=problem)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}: see {arguments.out}")


def run_process(name, out, folder, left):
    """Run a section in a process of its own; return what went wrong, if anything.

    left: Seconds of the budget.
    """
    command = [sys.executable, __file__, str(out), name, "--run", folder]
    # As scripts/launch.py sets it.
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}
    environment["HF_HUB_OFFLINE"] = "1"
    started, limit = time.monotonic(), round(min(SECTIONS[name][1], left))
    if limit <= 0:
        return f"not run: the budget of {BUDGET} s is spent"
    try:
        process = subprocess.run(
            command, env=environment, stderr=subprocess.PIPE, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return f"took more than {limit} s"
    print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    if process.returncode == 0:
        return None
    print(process.stderr, file=sys.stderr)
    lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
    # torch writes the rank of the process before each line.
    return lines[-1].removeprefix("[rank0]: ")


if __name__ == "__main__":
    main()
