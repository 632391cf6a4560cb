"""Measure training on one GPU, in at most 40 minutes: make bench-gpu

Models with the shapes of OPT-1.3B and Qwen3-0.6B and random weights train on random tokens, with
the lengths of chat data: nothing is downloaded. Measured are SFT, reward model and DPO (tokens per
second without padding, and MFU), and steps of PPO and GRPO (seconds, divided into generate, score
and train), each with the peak memory of tensors next to the one that scripts/estimate.py predicts.
Snakechat is compared with a plain loop over transformers' models (sequences padded to the longest
one of a pass), with DeepSpeed-Chat's method (padded to the limit), and with TRL, and with itself
without one acceleration at a time.

Each measurement is a process of train.py, rlhf.py, trl_way.py or trl_rlhf.py. The results are
written after each of them to tests/benchmarks/results/gpu-DEVICE.json. A measurement that fails or
that does not fit into the time is in the results with its reason.

--dry runs the same measurements with the smallest shapes on the CPU, to test this program.
"""

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from data import ROOT
from rlhf import EOS_RATE, KL_COEF, SECTIONS, TASKS, Case, make_eos_likely, read_case, rlhf_job
from train import SEED, WORK, child, make_job

HERE = Path(__file__).resolve().parent
MODELS = {
    "opt-1.3b": {
        "model_type": "opt",
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "word_embed_proj_dim": 2048,
        "num_attention_heads": 32,
        "ffn_dim": 8192,
        "max_position_embeddings": 2048,
        "vocab_size": 50272,
        "dropout": 0.0,
    },
    # The reward model of OPT-1.3B, as large as OPT-350M.
    "opt-350m": {
        "model_type": "opt",
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "word_embed_proj_dim": 1024,
        "num_attention_heads": 16,
        "ffn_dim": 4096,
        "max_position_embeddings": 2048,
        "vocab_size": 50272,
        "dropout": 0.0,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
}
REWARDS = {"opt-1.3b": "opt-350m", "qwen3-0.6b": "qwen3-0.6b"}
TINY = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 320}
TINY_SHAPES = {
    "opt": {"word_embed_proj_dim": 32, "num_attention_heads": 2, "ffn_dim": 64},
    "qwen3": {"intermediate_size": 64, "head_dim": 16, "num_attention_heads": 2}
    | {"num_key_value_heads": 1},
}


class Size(NamedTuple):
    """Sizes of all measurements. batch: rows of SFT, reward and DPO. prompts: those of PPO and,
    each with 8 responses, of GRPO. rows_per_pass: forward passes of the baselines.
    """

    batch: int
    limit: int
    micro_batch_tokens: int
    rows_per_pass: int
    prompts: int
    max_response_length: int
    warm_up: int
    steps: int


GPU = Size(64, 512, 16384, 16, 64, 256, 2, 6)
DRY = Size(4, 64, 256, 2, 8, 8, 1, 1)
# Names of the methods in train.py and rlhf.py.
METHODS = {name: name for name in ("hugging_face", "deepspeed_chat")} | {"snakechat": "ours"}
# Without one acceleration at a time, or with one that is off by default: placement and constants.
ACCELERATION = "snakechat.modeling.acceleration."
TRAINING_SWITCHES = {
    "pad_to_multiple_of: 1": ({"pad_to_multiple_of": 1}, {}),
    "prefetch: false": ({"prefetch": False}, {}),
    "cuDNN attention": ({}, {ACCELERATION + "GPU_CUDNN_ATTENTION": True}),
    "attn_implementation: varlen": ({"attn_implementation": "varlen"}, {}),
    "attn_implementation: flex": ({"attn_implementation": "flex"}, {}),
    "compile: true": ({"compile": True}, {}),
    "varlen, compiled": ({"attn_implementation": "varlen", "compile": True}, {}),
    "logit chunks of a CPU": ({}, {"snakechat.modeling.logprobs.GPU_CHUNK_LOGITS": 1 << 25}),
    "activation_checkpointing: true": ({"activation_checkpointing": True}, {}),
}
RLHF_SWITCHES = {
    "cuda_graphs: true": ({"cuda_graphs": True}, {}),
    "generate_tokens: 65536": ({"generate_tokens": 65536}, {}),
    "both": ({"cuda_graphs": True, "generate_tokens": 65536}, {}),
    "attn_implementation: auto": ({"attn_implementation": "auto"}, {}),
    "auto, compiled": ({"attn_implementation": "auto", "compile": True}, {}),
    "a stop check at each token": ({}, {ACCELERATION + "GPU_STOP_CHECK_STEPS": 1}),
}


class Measurement(NamedTuple):
    """A process to measure. job: a stage, or the algorithm of rlhf. switch: what differs from the
    defaults of the placement.
    """

    model: str
    job: str
    method: str
    switch: str = ""

    def __str__(self):
        return " / ".join(part for part in self if part)


def measurements():
    """Yield all measurements, the most important ones first."""
    yield from (Measurement("opt-1.3b", "sft", method) for method in ("snakechat", "hugging_face"))
    yield Measurement("qwen3-0.6b", "grpo", "snakechat")
    yield Measurement("opt-1.3b", "ppo", "snakechat")
    for job in ("ppo", "sft", "reward", "dpo"):
        yield Measurement("opt-1.3b", job, "deepspeed_chat")
    yield Measurement("qwen3-0.6b", "grpo", "trl")
    for switch in TRAINING_SWITCHES:
        yield Measurement("opt-1.3b", "sft", "snakechat", switch)
    for switch in RLHF_SWITCHES:
        yield Measurement("qwen3-0.6b", "grpo", "snakechat", switch)
    for job in ("reward", "dpo"):
        yield from (Measurement("opt-1.3b", job, method) for method in ("snakechat", "trl"))
    yield Measurement("opt-1.3b", "sft", "trl")
    for job in ("sft", "reward", "dpo"):
        yield from (
            Measurement("qwen3-0.6b", job, method)
            for method in ("snakechat", "hugging_face", "trl")
        )


def main():
    """Prepare models and tokens, measure, and write the results after each measurement."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry", action="store_true", help="smallest shapes, on the CPU")
    parser.add_argument("--minutes", type=float, default=40, help="time for all measurements")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the JSON")
    parser.add_argument("--trl-python", default=str(ROOT / ".venv-trl/bin/python"))
    arguments = parser.parse_args()
    if arguments.dry:
        # Before torch is imported: its threads do not survive a fork.
        os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    if not arguments.dry and not torch.cuda.is_available():
        sys.exit("torch finds no GPU: run this on a machine with one, or test it with --dry")
    device = "dry run on a CPU" if arguments.dry else torch.cuda.get_device_name()
    path = arguments.results / f"gpu-{re.sub('[^A-Za-z0-9]+', '-', device)}.json"
    size = DRY if arguments.dry else GPU
    started = time.monotonic()
    about = {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda}
    results = {**about, "size": size._asdict(), "measurements": {}}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), size, arguments.dry, arguments.trl_python)
        for measurement in measurements():
            remaining = arguments.minutes * 60 - (time.monotonic() - started)
            entry = bench.measure(measurement, remaining)
            results["measurements"][str(measurement)] = entry
            add_ratios(results["measurements"])
            results["minutes"] = round((time.monotonic() - started) / 60, 1)
            path.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{measurement}: {summary_line(entry)}", file=sys.stderr)
    print(path)


def add_ratios(entries):
    """Add the ratio of Snakechat's default speed to that of each measurement."""
    for name, entry in entries.items():
        model, job, *_ = name.split(" / ")
        default = entries.get(str(Measurement(model, job, "snakechat")), {})
        if "speed" in entry and "speed" in default:
            entry["speed_of_snakechat_over_this"] = round(default["speed"] / entry["speed"], 2)


def summary_line(entry):
    """Return the most important figures of an entry."""
    names = ("skipped", "failed", "tokens_per_second", "mfu", "seconds_per_step", *SECTIONS)
    names += ("peak_mb", "estimated_peak_mb", "speed_of_snakechat_over_this")
    return ", ".join(f"{name} {entry[name]}" for name in names if name in entry)


class Bench:
    """The models and tokens of all measurements, in a folder."""

    def __init__(self, folder, size, dry, trl_python):
        self.folder, self.size, self.dry, self.trl_python = folder, size, dry, trl_python

    def measure(self, measurement, remaining):
        """Return the figures of a measurement, or why there are none."""
        if measurement.method == "trl" and not Path(self.trl_python).exists():
            return {"skipped": f"{self.trl_python} does not exist: TRL is not installed"}
        if remaining <= 0:
            return {"skipped": "no time is left"}
        is_rlhf = measurement.job in ("ppo", "grpo")
        folder = self.prepare_rlhf(measurement) if is_rlhf else self.prepare(measurement.model)
        self.write_setup(folder, measurement)
        try:
            if self.dry:
                result = forked(measurement, folder)
            else:
                result = child(self.command(measurement, folder), self.folder, timeout=remaining)
        except subprocess.TimeoutExpired:
            return {"skipped": "no time was left to end it"}
        except SystemExit as error:
            lines = str(error.code).strip().splitlines()
            return {"failed": lines[-1] if lines else "no message"}
        figures = rlhf_figures if is_rlhf else training_figures
        entry = figures(folder, measurement, result, self.size.warm_up)
        entry["peak_mb"] = round(result["peak_mb"] - result["idle_mb"])
        if measurement.method == "snakechat":
            entry["estimated_peak_mb"] = round(estimated_peak(folder, measurement.job) / 2**20)
        return entry

    def command(self, measurement, folder):
        """Return the command of a measurement."""
        is_rlhf = measurement.job in ("ppo", "grpo")
        arguments = [str(folder), str(SEED)] if is_rlhf else [measurement.job, str(folder)]
        if measurement.method == "trl":
            return [
                self.trl_python,
                str(HERE / f"trl_{'rlhf' if is_rlhf else 'way'}.py"),
                *arguments,
            ]
        script = HERE / ("rlhf.py" if is_rlhf else "train.py")
        return [sys.executable, str(script), "--work", METHODS[measurement.method], *arguments]

    def write_setup(self, folder, measurement):
        """Write what train.py and rlhf.py read before a measurement."""
        size = self.size
        placement, constants = {**TRAINING_SWITCHES, **RLHF_SWITCHES}.get(
            measurement.switch, ({}, {})
        )
        placement = {"micro_batch_tokens": size.micro_batch_tokens, **placement}
        placement["gpus_per_node"] = 0 if self.dry else 1
        setup = {
            "device": "cpu" if self.dry else "cuda",
            "batch": size.batch,
            "limit": size.limit,
            "rows_per_pass": size.rows_per_pass,
            "placement": placement,
            "constants": constants,
        }
        (folder / "setup.json").write_text(json.dumps(setup))

    def prepare(self, name):
        """Return the folder of a model with the tokens of SFT, reward and DPO; make it once."""
        folder = self.folder / name
        if folder.exists():
            return folder
        self.save_model(name, folder / "model")
        self.write_setup(folder, Measurement(name, "sft", "snakechat"))
        size, shape = self.size, self.shape(name)
        number = size.batch * (size.warm_up + size.steps)
        fields = random_rows(number, size.limit, shape["vocab_size"])
        from snakechat.modeling.batching import global_batches

        for stage, names in (
            ("sft", ("prompt", "chosen")),
            ("reward", ("prompt", "chosen", "rejected")),
            ("dpo", ("prompt", "chosen", "rejected")),
        ):
            tokens = folder / f"tokens.{stage}"
            tokens.mkdir()
            for field in names:
                write_tokens(tokens, f"train.{field}", fields[field], shape["vocab_size"])
                write_tokens(tokens, f"eval.{field}", fields[field][:1], shape["vocab_size"])
            steps = [
                [{field: fields[field][row] for field in names} for row in rows]
                for rows in global_batches(number, size.batch, 1, SEED)
            ]
            (folder / f"{stage}.json").write_text(json.dumps(steps))
        compute_reference(folder)
        return folder

    def prepare_rlhf(self, measurement):
        """Return the folder of a case of rlhf; make it once."""
        folder = self.folder / f"{measurement.model} {measurement.job}"
        if folder.exists():
            return folder
        size, shape = self.size, self.shape(measurement.model)
        generations = 8 if measurement.job == "grpo" else 1
        prompts = size.prompts // generations * (2 if generations > 1 else 1)
        case = Case(
            str(shape["vocab_size"]),
            measurement.job,
            prompts,
            generations,
            size.max_response_length,
        )
        num_steps = size.warm_up + size.steps
        fields = random_rows(prompts * num_steps, min(size.limit, 256), shape["vocab_size"])
        rows = fields["prompt"]
        likelihood = EOS_RATE / size.max_response_length
        self.save_model(measurement.model, folder / "actor", rows[:16], likelihood)
        self.save_model(REWARDS[measurement.model], folder / "reward", scorer=True)
        write_tokens(folder, "train.prompt", rows, shape["vocab_size"])
        from snakechat.modeling.batching import global_batches

        steps = [
            [rows[row] for row in batch] for batch in global_batches(len(rows), prompts, 1, SEED)
        ]
        content = {**case._asdict(), "kl_coef": KL_COEF, "steps": steps}
        (folder / f"{SEED}.json").write_text(json.dumps(content))
        return folder

    def shape(self, name):
        """Return the transformers config of a model."""
        shape = MODELS[name]
        return shape | TINY | TINY_SHAPES[shape["model_type"]] if self.dry else shape

    def save_model(self, name, folder, prompts=None, likelihood=0.0, scorer=False):
        """Save a model with random weights in bf16.

        prompts, likelihood: after them, the response ends with this mean probability.
        """
        import torch
        from transformers import (
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForSequenceClassification,
        )

        from snakechat.modeling.models import SPECIAL_IDS
        from snakechat.modeling.saving import save_model

        tokenizer = small_tokenizer()
        torch.manual_seed(SEED)
        ids = {key: getattr(tokenizer, key) for key in SPECIAL_IDS}
        config = AutoConfig.for_model(**self.shape(name), **ids, num_labels=1)
        auto_class = AutoModelForSequenceClassification if scorer else AutoModelForCausalLM
        model = auto_class.from_config(config, dtype=torch.bfloat16)
        if prompts:
            if config.model_type == "opt":
                make_eos_likely(model, prompts, tokenizer.eos_token_id, likelihood)
            else:
                make_tied_eos_likely(model, prompts, tokenizer.eos_token_id, likelihood)
        save_model(model, tokenizer, folder)


def forked(measurement, folder):
    """Return the result of a measurement in a fork of this process, which has all modules."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run():
        method = METHODS[measurement.method]
        if measurement.job in ("ppo", "grpo"):
            sender.send(TASKS[method](folder, SEED))
        else:
            sender.send(WORK[method](measurement.job, folder))

    process = context.Process(target=run)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        sys.exit("the process ended without a result: see its traceback")
    finally:
        process.join()


def make_tied_eos_likely(model, prompts, eos_id, likelihood):
    """Do the same as rlhf.make_eos_likely for a model without biases and with tied embeddings.

    The first coordinate of all embeddings is 1, and stays positive in the last hidden state: that
    of eos then raises its logit alone.
    """
    import torch

    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        embeddings[:, 0] = 1
        for _ in range(3):
            hidden = torch.cat([model.model(torch.tensor([ids]))[0][0] for ids in prompts])
            current = (hidden @ embeddings.T).float().softmax(dim=-1)[:, eos_id].mean()
            missing = torch.tensor(likelihood).logit() - current.logit()
            embeddings[eos_id, 0] += missing / hidden[:, 0].float().mean()


def small_tokenizer():
    """Return a tokenizer with fewer tokens than the models, whose ids are random."""
    import random

    from init_model import train_tokenizer
    from snakechat.data import toy

    rows, _ = toy.make_rows(100, 10, random.Random(SEED))
    return train_tokenizer((text for row in rows for text in row.values()), 300)


def random_rows(number, limit, vocab_size):
    """Return random token ids by field, with log-normal lengths as in hh-rlhf."""
    random = np.random.default_rng(SEED)

    def ids(mean, deviation, highest):
        lengths = np.exp(random.normal(np.log(mean), deviation, number)).astype(int)
        # Ids of special tokens come first.
        return [
            random.integers(10, vocab_size, max(2, min(length, highest))).tolist()
            for length in lengths
        ]

    # Medians of 120 and 55 tokens at a limit of 512.
    return {
        "prompt": ids(limit / 4, 0.7, limit * 5 // 8),
        "chosen": ids(limit / 9, 0.8, limit * 3 // 8),
        "rejected": ids(limit / 9, 0.8, limit * 3 // 8),
    }


def write_tokens(folder, name, rows, vocab_size):
    """Write rows of token ids as the programs read them."""
    from snakechat.data.tokens import RaggedWriter

    with RaggedWriter(folder, name, vocab_size) as writer:
        writer.write(rows)


def training_figures(folder, measurement, result, warm_up):
    """Return tokens without padding per second, and the fraction of the GPU's peak FLOPs."""
    steps = json.loads((folder / f"{measurement.job}.json").read_text())[warm_up:]
    rows = [row for step in steps for row in step]
    lengths = [
        len(row["prompt"]) + len(row[field])
        for row in rows
        for field in ("chosen", "rejected")
        if field in row
    ]
    seconds = [end - start for start, end in pairwise(result["ends"][warm_up - 1 :])]
    per_second = sum(lengths) / sum(seconds)
    from snakechat.planning.flops import training_flops

    flops = training_flops(model_shape(folder / "model"), statistics.fmean(lengths))
    return {
        "tokens_per_second": round(per_second),
        "mfu": utilization(flops * per_second),
        "seconds_per_step": round(statistics.fmean(seconds), 4),
        "slowest_step_seconds": round(max(seconds), 4),
        "first_loss": round(result["loss"], 4),
        "speed": per_second,
    }


def rlhf_figures(folder, measurement, result, warm_up):
    """Return seconds of a step and its sections, and responses and their tokens per second."""
    steps = result["steps"][warm_up:]
    seconds = {name: statistics.fmean(step[name] for step in steps) for name in SECTIONS}
    total = sum(seconds.values())
    responses, tokens = (
        statistics.fmean(step[name] for step in steps) for name in ("responses", "tokens")
    )
    return {
        "seconds_per_step": round(total, 4),
        **{name: round(value, 4) for name, value in seconds.items()},
        "responses_per_second": round(responses / total, 2),
        "response_tokens_per_second": round(tokens / total),
        "mean_response_tokens": round(tokens / responses, 1),
        "speed": responses / total,
    }


def model_shape(folder):
    """Return the numbers that FLOPs depend on (planning/flops.py)."""
    from snakechat.planning.footprint import POLICY, ModelSpec, measure_size

    config = (folder / "config.json").read_text()
    return measure_size(ModelSpec(config, POLICY, "bf16"))._asdict()


def utilization(flops_per_second):
    """Return the fraction of the GPU's peak FLOPs, None if the peak is unknown."""
    import torch

    from snakechat.planning.flops import peak_flops

    if not torch.cuda.is_available():
        return None
    peak = peak_flops(torch.cuda.get_device_name())
    return peak and round(flops_per_second / peak, 4)


def estimated_peak(folder, stage):
    """Return the bytes that scripts/estimate.py predicts for a measured job."""
    from snakechat.planning.job_workloads import job_workload
    from snakechat.planning.plan import Plan, PlannedJob

    with tempfile.TemporaryDirectory(dir=folder) as work:
        if stage in ("ppo", "grpo"):
            job = rlhf_job(read_case(folder, SEED), folder, Path(work, "result"), SEED)
            rule, settings = "train_rlhf", dataclasses.asdict(job.settings)
            tokens = ("tokenize_rlhf", "tokens")
        else:
            job = make_job(stage, folder, Path(work, "result"))
            rule, settings = f"train_{stage}", vars(job.settings)
            tokens = (f"tokenize_{stage}", "tokens")
    jobs = {
        str(path): PlannedJob(
            {"rule": "fetch_model", "settings": {"hub": ""}}, {"source": str(path)}
        )
        for path in job.inputs.values()
    }
    jobs[str(job.inputs[tokens[1]])] = PlannedJob({"rule": tokens[0], "settings": {}}, {})
    inputs = {name: {"path": str(path)} for name, path in job.inputs.items()}
    workload = job_workload(
        {"rule": rule, "settings": settings, "inputs": inputs}, job.placement, Plan(jobs, set())
    )
    _, memory = workload.memory(job.placement)
    return sum(memory.values())


def compute_reference(folder):
    """Write the log-probabilities of DPO's reference model, and free its memory."""
    import torch

    importlib.import_module("compute_reference").main(make_job("dpo", folder, folder / "reference"))
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
