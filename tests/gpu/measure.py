"""Check and measure training on one GPU, in about ten minutes.

    python tests/gpu/measure.py OUT.jsonl [SECTION...]

Needs this checkout and a Python with torch (CUDA), transformers, peft and pyarrow: no network, no
Snakemake, no data, no model. Each section is a process with a time limit of its own and appends a
line of JSON to OUT.jsonl for each result as soon as it exists, so that a failure costs no other
result. The exit code is 1 if a section failed.
"""

import argparse
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
)
from snakechat.estimates.flops import peak_flops, training_flops  # noqa: E402
from snakechat.estimates.inputs import FIELDS  # noqa: E402
from snakechat.estimates.memory import peak_memory  # noqa: E402
from snakechat.estimates.workloads import job_workload  # noqa: E402
from snakechat.jobs.plan import Plan, PlannedJob  # noqa: E402
from snakechat.modeling.batching import Examples, training_batches  # noqa: E402
from snakechat.modeling.generation import sample_responses  # noqa: E402

SECTIONS = {}


class Size(NamedTuple):
    """Sizes of the measurements. large, chat: Models that train, and that sample."""

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


GPU = Size("opt-1.3b", "opt-350m", "qwen3-0.6b", 64, 512, 16384, 2, 6, 128, 256)
REHEARSAL = Size("tiny-opt", "tiny-opt", "tiny-opt", 8, 64, 256, 1, 2, 8, 16)


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
    """Record the versions of libraries."""
    names = ("transformers", "peft", "pyarrow", "numpy", "triton", "deepspeed")
    found = {name: version(name) for name in ("torch", *names)}
    major, minor = torch.cuda.get_device_capability()
    bench.record(
        device=torch.cuda.get_device_name(),
        capability=f"{major}.{minor}",
        memory_gib=round(torch.cuda.mem_get_info()[1] / 2**30, 1),
        cuda=torch.version.cuda,
        python=platform.python_version(),
        **found,
    )


@section(120)
def trainers(bench):
    """Train each kind of small model in fp32 for three steps, on a CPU and on the GPU."""
    for name in TINY_CASES:
        found = []
        for gpus in (0, 1):
            job = tiny_job(name, bench.folder, bench.work(), "fp32", gpus_per_node=gpus)
            train(job, 3)
            found.append(metrics(job))
        bench.record(case=name, steps=found[1][-1]["step"], **largest_difference(*found))


@section(240)
def sft(bench):
    """Measure SFT of the large model: speed, and memory beside the estimate."""
    size = bench.size
    inputs = {
        "model": model_folder(size.large, bench.folder, "cuda"),
        "tokens": tokens_folder(
            size.large, bench.folder, size.rows * (size.warm_up + size.steps + 1), size.limit
        ),
    }
    settings = {"max_length": size.limit, "global_batch_size": size.rows, "epochs": 1}
    fixed = {"gpus_per_node": 1, "micro_batch_tokens": size.micro_batch_tokens}
    for name, placement in (
        ("default", {}),
        ("sdpa", {"attn_implementation": "sdpa"}),
        ("compiled", {"compile": True}),
        ("activation checkpointing", {"activation_checkpointing": True}),
    ):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        job = make_job("sft", inputs, bench.work(), fixed | placement, **settings, dtype="bf16")
        seconds, tokens = step_seconds(bench, job)
        flops = training_flops(job.record["models"]["model"], tokens / size.rows)
        peak = peak_flops(torch.cuda.get_device_name())
        bench.record(
            case=name,
            tokens_per_second=round(tokens / seconds),
            seconds_per_step=round(seconds, 4),
            mfu=peak and round(flops * tokens / seconds / peak, 3),
            peak_gib=gib(torch.cuda.max_memory_allocated()),
            estimated_gib=gib(estimated_peak(job)),
        )


@section(180)
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
            responses = sample_responses(model, prompts, [2], size.response_length, 1.0, 8192)
            seconds = now() - started
        sampled = sum(len(ids) for row in responses for ids in row)
        bench.record(
            case=name,
            tokens=sampled,
            tokens_per_second=round(sampled / seconds),
            milliseconds_per_step=round(1000 * seconds / size.response_length, 2),
            peak_gib=gib(torch.cuda.max_memory_allocated()),
        )


@section(180)
def ppo(bench):
    """Measure steps of PPO of the large model by section."""
    size = bench.size
    torch.cuda.reset_peak_memory_stats()
    number = size.warm_up + size.steps
    tokens = tokens_folder(size.large, bench.folder, size.rows * (number + 1), size.limit)
    job = make_job(
        "rlhf",
        {
            "actor": model_folder(size.large, bench.folder, "cuda"),
            "reward": model_folder(size.scorer, bench.folder, "cuda", scorer=True),
            "tokens": tokens,
        },
        bench.work(),
        {"gpus_per_node": 1, "micro_batch_tokens": size.micro_batch_tokens},
        max_prompt_length=size.limit * 5 // 8,
        max_response_length=size.response_length,
        rollout_batch_size=size.rows,
        global_batch_size=size.rows,
        lora_rank=0,
        dtype="bf16",
        epochs=1,
    )
    train(job, number)
    lines = map(json.loads, (job.log_folder / "times.jsonl").read_text().splitlines())
    steps = list(lines)[size.warm_up :]
    names = [name for name, value in steps[0].items() if isinstance(value, float)]
    bench.record(
        responses=size.rows,
        **{name: round(statistics.median(step[name] for step in steps), 4) for name in names},
        peak_gib=gib(torch.cuda.max_memory_allocated()),
        estimated_gib=gib(estimated_peak(job)),
    )


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
    differences = {
        name: max(
            abs(step[name] - other[name]) / max(abs(other[name]), 1e-3)
            for step, other in zip(steps, expected, strict=True)
            if name in step
        )
        for name in expected[-1]
        if name.endswith(("loss", "grad_norm"))
    }
    name = max(differences, key=differences.__getitem__)
    return {"largest_difference": differences[name], "of": name}


def step_seconds(bench, job):
    """Train; return the mean seconds of the measured steps and their mean tokens."""
    size = bench.size
    ends = train(job, size.warm_up + size.steps)
    seconds = [end - start for start, end in pairwise(ends[size.warm_up - 1 :])]
    # With the tokens of prompts, which the log of a training does not count.
    examples = Examples.read(job.inputs["tokens"], "train", "chosen")
    lengths = examples.prompt_lengths + examples.response_lengths[0]
    batches = training_batches(len(examples), job.settings.global_batch_size, job.settings)
    rows = [batch for batch, _ in zip(batches, ends, strict=False)][size.warm_up :]
    return statistics.fmean(seconds), statistics.fmean(int(lengths[batch].sum()) for batch in rows)


def plan_of_inputs(job):
    """Return a plan of the inputs of a job, which exist; any model's folder has a config."""
    planned = {}
    for entry in job.spec["inputs"].values():
        rule = entry.get("rule") if entry.get("rule") in FIELDS else "fetch_model"
        planned[entry["path"]] = PlannedJob({"rule": rule, "settings": {"hub": ""}})
    return Plan(planned, set())


def estimated_peak(job):
    """Return the bytes that scripts/estimate.py predicts for a job."""
    workload = job_workload(job.spec, job.placement, plan_of_inputs(job))
    _, memory = peak_memory(workload, job.placement)
    return sum(memory.values())


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
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.sections or SECTIONS:
            if problem := run_process(name, arguments.out, folder):
                failed.append(name)
                Bench(name, arguments.out, Path(folder)).record(failed=problem)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}: see {arguments.out}")


def run_process(name, out, folder):
    """Run a section in a process of its own; return what went wrong, if anything."""
    command = [sys.executable, __file__, str(out), name, "--run", folder]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    started, limit = time.monotonic(), SECTIONS[name][1]
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
