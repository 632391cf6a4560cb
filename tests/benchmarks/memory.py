"""Memory of training in bf16: one process, and four at ZeRO 3 (make bench-memory).

Two models of 1.5 billion weights: each process samples from the model as evaluations do, loads it
for training, trains two steps, samples, and saves it. PPO: each process loads four models of 300
million weights, takes two steps and saves the actor. Peaks are bytes above the idle process,
swapped memory included. 32 GB of memory and swap, and 20 GB of disk are needed. Prints JSON; the
exit code is 1 if a process of the four needs more than BOUND of what the one needs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from init_model import train_tokenizer  # noqa: E402
from snakechat.modeling.models import SPECIAL_IDS  # noqa: E402
from snakechat.modeling.saving import save_model  # noqa: E402
from snakechat.workflow.run_record import cpu_name  # noqa: E402
from support.launching import launch  # noqa: E402

BOUND = 0.45
# Number of processes and ZeRO stage.
ALONE, TOGETHER = (1, 0), (4, 3)
SIZE = {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 32}
SIZE |= {"max_position_embeddings": 2048, "vocab_size": 50_272}
OPT = {**SIZE, "model_type": "opt", "word_embed_proj_dim": 2048, "ffn_dim": 8192, "dropout": 0.0}
LLAMA = {**SIZE, "model_type": "llama", "intermediate_size": 6144, "num_key_value_heads": 8}
# Config of transformers and LoRA rank.
MODELS = {"opt": (OPT, 0), "llama, LoRA": (LLAMA, 8)}
# Of a model with which each process does everything first: imports and buffers are not counted.
TINY = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8, "vocab_size": 320}
TINY_OF = {
    "opt": {**TINY, "word_embed_proj_dim": 64, "ffn_dim": 256},
    "llama": {**TINY, "intermediate_size": 192},
}
# Hidden size and layers of the four models of PPO.
PPO = (1024, 24)


def main():
    """Measure the cases; print a line for each to standard error and the results as JSON."""
    cases = [*MODELS, "ppo"]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", help="where to work, with 20 GB; by default in /tmp")
    parser.add_argument("--cases", nargs="*", choices=cases, default=cases)
    arguments = parser.parse_args()
    # glibc returns freed memory at once: it would otherwise count as peak memory of later phases.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "500000"
    results = {}
    for name in arguments.cases:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            measured = ppo(Path(folder)) if name == "ppo" else model(*MODELS[name], Path(folder))
        results[name] = measured
        print(name, measured, file=sys.stderr, flush=True)
    commit = subprocess.check_output(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], text=True)
    machine = {"cpu": cpu_name(), "threads": 1, "commit": commit.strip()}
    print(json.dumps({**machine, "results": results}, indent=1))
    if any(result["ratio"] > BOUND for result in results.values()):
        sys.exit(f"error: a process needs more than {BOUND} of the memory of one process alone")


def model(config, lora_rank, folder):
    """Measure a model, and compare what both runs saved."""
    num_weights = make_model(config, folder / "model")
    make_model(config | TINY_OF[config["model_type"]], folder / "tiny")
    peaks = [
        run("memory_worker", folder / "model", number, stage, "bf16", lora_rank)
        for number, stage in (ALONE, TOGETHER)
    ]
    saved = [folder / f"model/saved-{stage}" for _, stage in (ALONE, TOGETHER)]
    return {"weights": num_weights, **summary(*peaks), "difference": largest_difference(*saved)}


def ppo(folder):
    """Measure the four models of PPO."""
    return summary(*(run("ppo_memory_worker", folder, *each, *PPO) for each in (ALONE, TOGETHER)))


def run(worker, folder, processes, stage, *arguments):
    """Return the peaks of each process in bytes by phase."""
    program = ROOT / f"tests/support/{worker}.py"
    process = launch(processes, program, folder, stage, *arguments)
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(output[-5000:])
    files = [folder / f"{stage}-{rank}.json" for rank in range(processes)]
    return [json.loads(path.read_text())["peaks"] for path in files]


def summary(alone, together):
    """Return the highest peaks of both runs in MB by phase, and the ratio of the highest of all."""
    highest = [
        {phase: max(peaks[phase] for peaks in run) for phase in run[0]} for run in (alone, together)
    ]
    alone_mb, together_mb = (
        {phase: round(peak / 1e6) for phase, peak in peaks.items()} for peaks in highest
    )
    ratio = max(highest[1].values()) / max(highest[0].values())
    return {"alone_mb": alone_mb, "together_mb": together_mb, "ratio": round(ratio, 3)}


def make_model(config, folder):
    """Save a model of random weights in bf16; return their number."""
    tokenizer = train_tokenizer((f"word{i} thing{7 * i}" for i in range(300)), 300)
    ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
    torch.manual_seed(1)
    config = AutoConfig.for_model(**config, **ids)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    save_model(model, tokenizer, folder)
    return model.num_parameters()


def largest_difference(folder, other):
    """Return the largest absolute difference between the weights of two models."""
    with (
        safe_open(folder / "model.safetensors", "pt") as file,
        safe_open(other / "model.safetensors", "pt") as expected,
    ):
        return max(
            (file.get_tensor(name).float() - expected.get_tensor(name).float()).abs().max().item()
            for name in expected.keys()  # noqa: SIM118
        )


if __name__ == "__main__":
    main()
