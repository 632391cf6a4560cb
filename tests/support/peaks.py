"""Peaks of training programs, measured: run by scripts/launch.py for tests/test_estimate.py.

Each case runs a program's own main for two steps; FOLDER/RANK.json has the most bytes of tensors
that there were at a time, by case. On a GPU torch counts them; on a CPU its profiler does, which
sees all that torch's allocator hands out in the thread that trains.
"""

import contextlib
import gc
import importlib
import json
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from snakechat.planning.dry_run import PlannedJob  # noqa: E402
from snakechat.planning.memory import ZeroBuffers  # noqa: E402
from snakechat.planning.plan import Plan  # noqa: E402
from snakechat.workflow import distributed as ranks  # noqa: E402

# So wide that ZeRO 3 cuts its matrices up: DeepSpeed leaves those of 100,000 elements whole.
INIT = {
    "model_type": "opt",
    "num_hidden_layers": 3,
    "hidden_size": 320,
    "word_embed_proj_dim": 320,
    "num_attention_heads": 5,
    "ffn_dim": 640,
    "max_position_embeddings": 256,
    "dropout": 0.0,
}
WORDS, KNOWN_WORDS, PROMPT, RESPONSE = 1024, 300, 104, 24
# DeepSpeed's own bucket of gradients, of 2 GB, would be most of so small a job.
ZERO = ZeroBuffers(bucket=1_000_000)
SETTINGS = {
    "max_length": PROMPT + RESPONSE,
    "max_prompt_length": PROMPT,
    "max_response_length": RESPONSE,
    "global_batch_size": 16,
    "rollout_batch_size": 16,
    "dtype": "fp32",
    "seed": 1,
    "template": "chat",
}
LORA = {"lora_rank": 8}
BF16 = {"dtype": "bf16"}
CHECKPOINTING = {"activation_checkpointing": True}
# (stage, settings, placement), by the number of processes.
CASES = {
    1: {
        "sft": ("sft", {}, {}),
        "sft, bf16": ("sft", BF16, {}),
        "sft, checkpointing": ("sft", {}, CHECKPOINTING),
        "sft, lora": ("sft", LORA, {}),
        "sft, bf16, lora, checkpointing": ("sft", BF16 | LORA, CHECKPOINTING),
        "reward": ("reward", {}, {}),
        "reward, bf16, lora, checkpointing": ("reward", BF16 | LORA, CHECKPOINTING),
        "ppo": ("rlhf", {}, {}),
        "ppo, bf16, lora": ("rlhf", BF16 | LORA, {}),
        "ppo, checkpointing": ("rlhf", {}, CHECKPOINTING),
    },
    2: {
        "sft, ZeRO 0": ("sft", {}, {"zero_stage": 0}),
        "sft, ZeRO 1": ("sft", {}, {"zero_stage": 1}),
        "sft, ZeRO 2, bf16": ("sft", BF16, {"zero_stage": 2}),
        "sft, ZeRO 3": ("sft", {}, {"zero_stage": 3}),
        "sft, ZeRO 3, bf16, lora": ("sft", BF16 | LORA, {"zero_stage": 3}),
        "reward, ZeRO 3, checkpointing": ("reward", {}, {"zero_stage": 3, **CHECKPOINTING}),
        "ppo, ZeRO 2, lora": ("rlhf", LORA, {"zero_stage": 2}),
        "ppo, ZeRO 3, bf16": ("rlhf", BF16, {"zero_stage": 3}),
    },
}


class Finished(Exception):
    """All that is measured is done."""


def spec_of(rule, folder, settings, **inputs):
    """The spec of a job whose result, or whose inputs, are folders in a folder."""
    entries = {
        key: {"rule": rule, "name": "peaks", "path": f"{folder}/{name}"}
        for key, (rule, name) in inputs.items()
    }
    return {"rule": rule, "name": "peaks", "settings": settings, "inputs": entries}


def training(case, processes, folder):
    """The spec and the placement of a case."""
    stage, settings, placement = case
    defaults = yaml.safe_load((ROOT / "config.yaml").read_text())[stage]["defaults"]
    defaults.pop("placement")
    inputs = {"tokens": (f"tokenize_{stage}", f"tokens.{stage}")}
    if stage == "rlhf":
        inputs |= {"actor": ("train_sft", "sft"), "reward": ("train_reward", "reward")}
        inputs |= {"tokens.reward": ("tokenize_reward", "tokens.reward")}
    else:
        inputs["model"] = ("init_model", "model")
    where = {
        "nodes": 1,
        "gpus_per_node": processes if torch.cuda.is_available() else 0,
        "zero_stage": 0,
        "offload": "none",
        "activation_checkpointing": False,
        "micro_batch_tokens": 512,
        "threads": 1,
        "save_steps": 1000,
        **placement,
    }
    if processes > 1 and not where["gpus_per_node"]:
        where["nodes"] = processes
    spec = spec_of(f"train_{stage}", folder, defaults | SETTINGS | settings, **inputs)
    return spec, where


def plan_of(folder):
    """The Plan of the jobs before: what tells the estimate of models and tokens."""
    settings = {"init": INIT, "tokenizer": {"vocab_size": WORDS}}
    base = {"model": ("init_model", "model")}
    specs = {"model": spec_of("init_model", folder, settings)}
    specs |= {name: spec_of(f"train_{name}", folder, {}, **base) for name in ("sft", "reward")}
    for stage in ("sft", "reward", "rlhf"):
        specs[f"tokens.{stage}"] = spec_of(f"tokenize_{stage}", folder, SETTINGS)
    jobs = {f"{folder}/{name}": PlannedJob(spec, {}, "") for name, spec in specs.items()}
    return Plan(jobs, set())


def prepare(folder):
    """A model as base, SFT and reward model, and tokens of each stage."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from init_model import train_tokenizer
    from snakechat.data.tokens import RaggedWriter
    from snakechat.modeling.models import SPECIAL_IDS, load_scorer, save_model

    tokenizer = train_tokenizer((f"word{i} thing{7 * i}" for i in range(300)), KNOWN_WORDS)
    ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
    config = AutoConfig.for_model(**INIT, vocab_size=WORDS, **ids)
    # In 16 bits: a CPU has the numbers of a file beside those of the model.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    save_model(model, tokenizer, folder / "model")
    (folder / "sft").symlink_to(folder / "model")
    scorer = load_scorer(folder / "model", "bf16", tokenizer, new_head=True)
    save_model(scorer, tokenizer, folder / "reward")
    random = np.random.default_rng(0)
    fields = {"prompt": PROMPT, "chosen": RESPONSE, "rejected": RESPONSE}
    for stage in ("sft", "reward", "rlhf"):
        tokens = folder / f"tokens.{stage}"
        tokens.mkdir()
        for part, rows in (("train", 32), ("eval", 8)):
            for field, length in fields.items():
                with RaggedWriter(tokens, f"{part}.{field}", WORDS) as writer:
                    writer.write([random.integers(5, 250, length).tolist() for _ in range(rows)])


class Peak:
    """The most bytes of tensors at a time while it lasts, beyond those before."""

    def __enter__(self):
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            self.profile = torch.autograd.profiler.profile(profile_memory=True)
            self.profile.__enter__()
        return self

    def __exit__(self, *error):
        if torch.cuda.is_available():
            self.bytes = torch.cuda.max_memory_allocated() - self.before
            return
        self.profile.__exit__(None, None, None)
        events = [*self.profile.kineto_results.experimental_event_tree()]
        allocations = []
        while events:
            event = events.pop()
            events += event.children
            if event.tag.name == "Allocation":
                fields = event.extra_fields
                allocations.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        there, now, self.bytes = {}, 0, 0
        for _, place, size in sorted(allocations):
            # What another thread has freed is not told, but its place is given away again.
            now -= there.pop(place, 0)
            if size > 0:
                there[place] = size
                now += size
            self.bytes = max(self.bytes, now)


def measure(case, number, folder):
    """Bytes at the peak of two steps of a case, up to the moment before it is saved."""
    from snakechat.training.checkpointing import Checkpointer

    spec, placement = training(case, ranks.world_size(), folder)
    result = folder / f"{number}"
    result.mkdir(exist_ok=True)
    inputs = {key: Path(entry["path"]) for key, entry in spec["inputs"].items()}
    job = SimpleNamespace(
        settings=SimpleNamespace(**spec["settings"]),
        placement=placement,
        inputs=inputs,
        result=result,
        log_folder=result / "logs",
        states=result / "states",
        record={},
        facts={},
        lineage={},
        spec=spec,
    )
    program = importlib.import_module(spec["rule"])
    # Neither of them is what is measured: their records are not there.
    program.check_probes = program.shared_prompts = lambda *_: None
    program.save_model = finish
    steps = Checkpointer.steps
    Checkpointer.steps = lambda self, batches: collected(islice(steps(self, batches), 2))
    try:
        with Peak() as peak, contextlib.suppress(Finished):
            program.main(job)
    finally:
        Checkpointer.steps = steps
    return peak.bytes


def collected(steps):
    """Steps, behind each of which is no garbage: DeepSpeed leaves some, until Python finds it."""
    for step in steps:
        yield step
        gc.collect()


def finish(*_):
    """In the place of save_model."""
    raise Finished


def main(folder):
    """Measure the cases of so many processes."""
    from snakechat.training.process_group import init_process_group

    processes = ranks.world_size()
    _, placement = training(
        CASES[processes]["sft, ZeRO 0" if processes > 1 else "sft"], processes, ""
    )
    init_process_group(placement)
    import deepspeed

    initialize = deepspeed.initialize

    def with_small_buckets(*arguments, config, **named):
        config["zero_optimization"]["reduce_bucket_size"] = ZERO.bucket
        return initialize(*arguments, config=config, **named)

    deepspeed.initialize = with_small_buckets
    if ranks.rank() == 0:
        prepare(folder)
    ranks.barrier()
    found = {
        name: measure(case, number, folder)
        for number, (name, case) in enumerate(CASES[processes].items())
    }
    (folder / f"{ranks.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
