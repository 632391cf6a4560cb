"""Measure peak memory of training programs; scripts/launch.py runs it for test_memory.py.

Each case runs the main function of a program for two steps. FOLDER/RANK.json has the peak bytes of
tensors by case. On a GPU torch counts them; on a CPU its profiler does, which records allocations
in the training thread.
"""

import contextlib
import dataclasses
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from snakechat.planning.plan import Plan, PlannedJob  # noqa: E402
from snakechat.training.zero_stages import DEFAULT_BUFFERS  # noqa: E402
from snakechat.workflow import distributed as ranks  # noqa: E402

# Matrices of more than 100,000 elements, which ZeRO 3 partitions: it keeps smaller ones whole.
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
VOCABULARY, TOKENIZER_SIZE, PROMPT, RESPONSE = 1024, 300, 104, 24
# DeepSpeed's default bucket of 2 GB would exceed everything else.
BUFFERS = DEFAULT_BUFFERS._replace(bucket=1_000_000)
SETTINGS = {
    "max_length": PROMPT + RESPONSE,
    "max_prompt_length": PROMPT,
    "max_response_length": RESPONSE,
    "global_batch_size": 16,
    "rollout_batch_size": 16,
    "dtype": "fp32",
    "seed": 1,
    "template": "dialogue",
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
    """The measured steps are done."""


def spec_of(rule, folder, settings, **inputs):
    """The spec of a job whose inputs are subfolders of a folder."""
    entries = {
        key: {"rule": rule, "name": "peaks", "path": f"{folder}/{name}"}
        for key, (rule, name) in inputs.items()
    }
    return {"rule": rule, "name": "peaks", "settings": settings, "inputs": entries}


def training(case, processes, folder):
    """Return the spec and the placement of a case."""
    stage, settings, placement = case
    defaults = yaml.safe_load((ROOT / "config.yaml").read_text())[stage]["defaults"]
    defaults.pop("placement")
    inputs = {"tokens": (f"tokenize_{stage}", f"tokens.{stage}")}
    if stage == "rlhf":
        inputs |= {"actor": ("train_sft", "sft"), "reward": ("train_reward", "reward")}
        inputs |= {"tokens.reward": ("tokenize_reward", "tokens.reward")}
        defaults["reward_templates"] = {defaults["reward"]: SETTINGS["template"]}
        defaults["critic_lr_schedule"] = defaults["lr_schedule"]
    else:
        inputs["model"] = ("init_model", "model")
    values = {
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
    if processes > 1 and not values["gpus_per_node"]:
        values["nodes"] = processes
    spec = spec_of(f"train_{stage}", folder, defaults | SETTINGS | settings, **inputs)
    return spec, values


def plan_of(folder):
    """The Plan of the upstream jobs, from which estimates read models and tokens."""
    settings = {"init": INIT, "tokenizer": {"vocab_size": VOCABULARY}}
    base = {"model": ("init_model", "model")}
    specs = {"model": spec_of("init_model", folder, settings)}
    specs |= {name: spec_of(f"train_{name}", folder, {}, **base) for name in ("sft", "reward")}
    for stage in ("sft", "reward", "rlhf"):
        specs[f"tokens.{stage}"] = spec_of(f"tokenize_{stage}", folder, SETTINGS)
    jobs = {f"{folder}/{name}": PlannedJob(spec, {}) for name, spec in specs.items()}
    return Plan(jobs, set())


def prepare(folder, init=INIT):
    """Create a base, SFT and reward model, and tokens of each stage.

    init: Config of the models.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from init_model import train_tokenizer
    from snakechat.data.tokens import RaggedWriter
    from snakechat.modeling.loading import load_scorer
    from snakechat.modeling.models import SPECIAL_IDS
    from snakechat.modeling.saving import save_model

    tokenizer = train_tokenizer((f"word{i} thing{7 * i}" for i in range(300)), TOKENIZER_SIZE)
    ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
    config = AutoConfig.for_model(**init, vocab_size=VOCABULARY, **ids)
    # In 16 bits: a CPU holds the file's tensors in addition to the model's.
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
        for split, rows in (("train", 32), ("eval", 8)):
            for field, length in fields.items():
                with RaggedWriter(tokens, f"{split}.{field}", VOCABULARY) as writer:
                    writer.write([random.integers(5, 250, length).tolist() for _ in range(rows)])


class Peak:
    """Context that measures the peak bytes of tensors, in addition to those at its start."""

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
        live, current, self.bytes = {}, 0, 0
        for _, address, size in sorted(allocations):
            # Frees by other threads are not recorded, but their addresses are reused.
            current -= live.pop(address, 0)
            if size > 0:
                live[address] = size
                current += size
            self.bytes = max(self.bytes, current)


def settings_of(spec):
    """Return the settings of a spec; fields that it does not have are None."""
    from snakechat.config.reward import RewardSettings
    from snakechat.config.rlhf import RlhfSettings
    from snakechat.config.sft import SftSettings

    types = {
        "train_sft": SftSettings,
        "train_reward": RewardSettings,
        "train_rlhf": RlhfSettings,
    }
    settings_type = types[spec["rule"]]
    names = [field.name for field in dataclasses.fields(settings_type)]
    return settings_type(**{name: spec["settings"].get(name) for name in names})


def run_two_steps(case, result, folder, last=None):
    """Run a training program for two steps.

    Args:
        case: Stage, settings and placement.
        result: Folder of the results.
        folder: What prepare wrote.
        last: Name of a function in the program, at whose call it ends. None runs all of it.
    """
    from snakechat.algorithms import rlhf_models
    from snakechat.training.checkpointing import Checkpointer

    spec, placement = training(case, ranks.world_size(), folder)
    result.mkdir(exist_ok=True)
    inputs = {key: Path(entry["path"]) for key, entry in spec["inputs"].items()}
    job = SimpleNamespace(
        settings=settings_of(spec),
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
    # These checks need records of other jobs.
    rlhf_models.check_probes = lambda *_: None
    program.count_shared_prompts = lambda *_: {}
    if last is not None:
        setattr(program, last, finish)
    steps = Checkpointer.steps
    Checkpointer.steps = lambda self, batches: collect_garbage(islice(steps(self, batches), 2))
    try:
        with contextlib.suppress(Finished):
            program.main(job)
    finally:
        Checkpointer.steps = steps


def measure(case, number, folder):
    """Return the peak bytes of two steps of a case, until before the model is saved."""
    with Peak() as peak:
        run_two_steps(case, folder / f"{number}", folder, "save_model")
    return peak.bytes


def collect_garbage(steps):
    """Yield steps and collect garbage after each: DeepSpeed leaves reference cycles."""
    for step in steps:
        yield step
        gc.collect()


def finish(*_):
    """Replacement of a function of a program."""
    raise Finished


def main(folder):
    """Measure the cases of this number of processes."""
    from snakechat.training.process_group import init_process_group

    processes = ranks.world_size()
    _, placement = training(
        CASES[processes]["sft, ZeRO 0" if processes > 1 else "sft"], processes, ""
    )
    init_process_group(placement)
    import deepspeed

    initialize = deepspeed.initialize

    def with_small_buckets(*arguments, config, **named):
        zero = config["zero_optimization"]
        zero["reduce_bucket_size"] = min(zero["reduce_bucket_size"], BUFFERS.bucket)
        return initialize(*arguments, config=config, **named)

    deepspeed.initialize = with_small_buckets
    if ranks.rank() == 0:
        prepare(folder)
    ranks.barrier()
    peaks = {
        name: measure(case, number, folder)
        for number, (name, case) in enumerate(CASES[processes].items())
    }
    (folder / f"{ranks.rank()}.json").write_text(json.dumps(peaks))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
