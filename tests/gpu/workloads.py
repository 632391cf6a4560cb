"""Models of random weights and jobs of trainers on random tokens, for measurements.

They need no download and only the libraries that training needs. Settings are the defaults of
config.yaml.
"""

import importlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    OPTForCausalLM,  # noqa: F401 not within a measurement
)

from snakechat.config.rlhf import RlhfSettings
from snakechat.config.settings import DpoSettings, RewardSettings, SftSettings
from snakechat.data.ragged_arrays import open_ragged
from snakechat.modeling.models import accelerated, acceleration, choose_device
from snakechat.modeling.saving import save_model
from snakechat.training.checkpointing import Checkpointer
from snakechat.training.placed_models import leave_process_group
from snakechat.workflow.processes import Placement, RunOptions
from support import family_tokenizers
from support.configs import project_values
from support.specs import OPT_CONFIGS, opt_config

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"sft": SftSettings, "reward": RewardSettings, "dpo": DpoSettings, "rlhf": RlhfSettings}
SEED = 1
SHAPES = {
    # The reward model of OPT-1.3B is OPT-350M.
    **{name: {**OPT_CONFIGS[name], "dropout": 0.0} for name in ("opt-1.3b", "opt-350m")},
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
        "tie_word_embeddings": True,
    },
    "tiny-qwen3": {
        **{"model_type": "qwen3", "vocab_size": 320, "num_hidden_layers": 2, "hidden_size": 32},
        **{"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 8, "max_position_embeddings": 512, "tie_word_embeddings": True},
    },
    "tiny-opt": opt_config(2, 32, 2, ffn_dim=64, vocab_size=320, dropout=0.0, init_std=0.1),
}

# Trainings of small models: the stage, and settings besides those that all share.
ON_PAIRS = {"max_length": 48, "learning_rate": 1e-3, "global_batch_size": 8}
ON_PROMPTS = {
    "max_prompt_length": 32,
    "max_response_length": 16,
    "rollout_batch_size": 8,
    "global_batch_size": 8,
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-3,
    "lora_rank": 0,
}
GRPO = {"algorithm": "grpo", "num_generations": 4, "global_batch_size": 32}
GRPO |= {"kl_in": "loss", "kl_estimator": "k3"}
CONFIG = project_values()
GSM8K = CONFIG["rlhf"]["recipes"]["gsm8k-qwen2.5-0.5b"]
# Random tokens have no text that its reward function could score.
SMALL_GSM8K = {**GSM8K, **ON_PROMPTS, "reward": "reward", "reward_functions": {}}
SMALL_GSM8K |= {"kl_in": "loss", "lora_rank": GSM8K["lora_rank"]}
SMALL_GSM8K |= {"global_batch_size": ON_PROMPTS["rollout_batch_size"] * GSM8K["num_generations"]}
TINY_CASES = {
    "sft": ("sft", ON_PAIRS),
    "reward": ("reward", ON_PAIRS),
    "dpo": ("dpo", ON_PAIRS),
    "ppo": ("rlhf", ON_PROMPTS),
    "grpo": ("rlhf", ON_PROMPTS | GRPO),
    "gsm8k": ("rlhf", SMALL_GSM8K),
}


def make_model(name, device, scorer=False):
    """Return a model with random weights in bf16, made on its device."""
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(
        **SHAPES[name], num_labels=1, bos_token_id=0, eos_token_id=2, pad_token_id=1
    )
    config._attn_implementation = "sdpa"
    family = AutoModelForSequenceClassification if scorer else AutoModelForCausalLM
    with torch.device(device):
        return family.from_config(config, dtype=torch.bfloat16)


def model_folder(name, folder, device, scorer=False):
    """Return the folder of a model with random weights; make it once."""
    path = folder / f"{name}{'-scorer' if scorer else ''}"
    if not path.exists():
        save_model(make_model(name, device, scorer).to("cpu"), family_tokenizers.toy(), path)
    return path


def tokens_folder(name, folder, num_rows, limit):
    """Return a folder of random tokens with the lengths of chat data; make it once.

    limit: Maximum number of tokens of a row. The median prompt has a quarter of it, and the
        median response a ninth.
    """
    path, random = folder / f"tokens-{name}-{num_rows}-{limit}", np.random.default_rng(SEED)
    if path.exists():
        return path
    vocab_size, fields = SHAPES[name]["vocab_size"], {}
    for field, median, highest in (
        ("prompt", limit / 4, limit * 5 // 8),
        ("chosen", limit / 9, limit * 3 // 8),
        ("rejected", limit / 9, limit * 3 // 8),
    ):
        lengths = np.exp(random.normal(np.log(median), 0.75, num_rows)).astype(int)
        # Ids of special tokens come first.
        rows = [random.integers(10, vocab_size, max(2, min(n, highest))) for n in lengths]
        fields[field] = [row.tolist() for row in rows]
    write_tokens(path, vocab_size, **fields)
    return path


def write_tokens(path, vocab_size, **fields):
    """Write a folder of tokens: each field, and its first row as held-out data."""
    path.mkdir()
    stats = {split: {"template": "dialogue"} for split in ("train", "eval")}
    (path / "stats.json").write_text(json.dumps(stats))
    for field, rows in fields.items():
        for split, part in (("train", rows), ("eval", rows[:1])):
            with open_ragged(path, f"{split}.{field}", vocab_size) as write_rows:
                write_rows(part)


def make_job(stage, inputs, result, placement, **settings):
    """Return a job of a trainer with the defaults of a stage.

    placement: Its changes of the placement `single_gpu`, or of `cpu` with gpus_per_node 0.
    """
    for folder in (result / "logs", result / "states"):
        folder.mkdir(parents=True, exist_ok=True)
    hardware = CONFIG["deployments"]["single_gpu" if placement["gpus_per_node"] else "cpu"]
    kind = SETTINGS[stage]
    names = kind.model_fields
    defaults = CONFIG[stage]["defaults"] | {"seed": SEED}
    if stage == "rlhf":
        defaults |= {"kl_in": "rewards", "kl_estimator": "k1", "critic_lr_schedule": "cosine"}
        defaults |= {"reward": "reward", "reward_templates": {"reward": "dialogue"}}
        defaults |= {"llm_judges": {}}
    values = {key: value for key, value in (defaults | settings).items() if key in names}
    rule = f"train_{stage}"
    rules = {"tokens": f"tokenize_{stage}", "reward": "train_reward"}
    return SimpleNamespace(
        settings=kind(**values),
        placement=Placement(**hardware | placement),
        options=RunOptions(save_steps=1 << 30),
        inputs=inputs,
        result=result,
        target=result,
        log_folder=result / "logs",
        states=result / "states",
        record={},
        facts={},
        lineage={},
        spec={
            "rule": rule,
            "name": "random",
            "path": str(result),
            "settings": values,
            "inputs": {
                key: {"path": str(path), "rule": rules.get(key, "")} for key, path in inputs.items()
            },
        },
    )


def tiny_job(name, folder, result, dtype, **placement):
    """Return a job of TINY_CASES, whose inputs are made on the CPU in a folder.

    placement: Its changes; gpus_per_node is one of them.
    """
    stage, settings = TINY_CASES[name]
    model = model_folder("tiny-opt", folder, "cpu")
    inputs = {
        "model": model,
        "actor": model,
        "reward": model_folder("tiny-opt", folder, "cpu", scorer=True),
        "tokens": tokens_folder("tiny-opt", folder, 32, 48),
    }
    common = {"epochs": 1, "dtype": dtype, "warmup_steps": 0}
    placement = {"micro_batch_tokens": 128, **placement}
    job = make_job(stage, inputs, result, placement, **common | settings)
    if stage == "dpo":
        job.inputs["reference"] = result.with_name("reference")
        write_reference(job)
    return job


def write_reference(job):
    """Write the log-probabilities of DPO's reference model, an input of a job."""
    folder = job.inputs["reference"]
    folder.mkdir()
    keys = {"mismatched_max_length": None, "batches": None, "dtype": job.settings.dtype}
    changes = {"result": folder, "settings": SimpleNamespace(**keys)}
    importlib.import_module("compute_reference").main(SimpleNamespace(**vars(job) | changes))


@contextmanager
def configured(gpus=1, **placement):
    """Context in which this process is configured for a placement; yields its device."""
    with accelerated(acceleration()):
        yield choose_device(Placement(**{"gpus_per_node": gpus, **placement}))


class Finished(Exception):
    """Ends a trainer after the last measured step."""


def train(job, number):
    """Run the main of a trainer for a number of steps; return the times of their ends."""
    program = importlib.import_module(job.spec["rule"])
    ends, steps = [], Checkpointer.steps

    def timed(checkpointer, batches) -> Iterator:
        for step in steps(checkpointer, batches):
            yield step
            ends.append(now())
            if len(ends) == number:
                raise Finished

    try:
        with mock.patch.object(Checkpointer, "steps", timed), suppress(Finished):
            program.main(job)
    finally:
        leave_process_group()
    return ends


def now():
    """Return the time at which all work so far, on a GPU too, is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def metrics(job):
    """Return the metrics of each step of a job."""
    return list(map(json.loads, (job.result / "metrics.jsonl").read_text().splitlines()))
