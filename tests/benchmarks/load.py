"""Load: a thousand recipes, a million rows, ten thousand files, a model of 20 GB (make bench-load).

Measures the CPU time of a command with all its processes, the time until it ends, which depends on
what else the machine does, and the memory of its largest process. The exit code is 1 if a bound on
CPU time or memory is exceeded. The model is a sparse file; its copy in the result takes 20 GB of
disk for some minutes. Prints JSON.
"""

import argparse
import json
import math
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from snakechat.data.toy import make_rows  # noqa: E402
from snakechat.workflow.run_record import cpu_name  # noqa: E402

RECIPES, ROWS, FILES = 1_000, 1_000_000, 10_000
# Distinct rows among the million.
DISTINCT_ROWS = 20_000
# A Llama of 20 GB in bf16.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 49,
    "vocab_size": 10_000,
}
# CPU seconds and MB that must not be exceeded.
BOUNDS = {
    "plan a thousand recipes": (40, 600),
    "plan them again": (40, 600),
    "import a million rows": (240, 800),
    "split a million rows": (60, 800),
    "tokenize a million rows": (600, 1_000),
    "first plan of ten thousand files": (20, 400),
    "second plan of ten thousand files": (15, 400),
    "plan a model of 20 GB": (120, 400),
    "fetch a model of 20 GB": (400, 1_500),
}


class Usage(NamedTuple):
    """CPU seconds of a command and its processes, its duration, and the MB of the largest one."""

    cpu_seconds: float
    seconds: float
    mb: float


def main():
    """Measure all; print a line for each to standard error and the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", help="where to work, with 25 GB; by default in /tmp")
    parser.add_argument(
        "--parts", nargs="*", choices=MEASURES, default=list(MEASURES), help="what to measure"
    )
    arguments = parser.parse_args()
    results = []
    for part in arguments.parts:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            for name, usage in MEASURES[part](Path(folder)):
                results.append(result(name, usage))
                print(results[-1], file=sys.stderr, flush=True)
    commit = subprocess.check_output(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], text=True)
    machine = {"cpu": cpu_name(), "threads": 1, "commit": commit.strip()}
    print(json.dumps({**machine, "results": results}, indent=1))
    exceeded = [each["name"] for each in results if not each["within_bounds"]]
    if exceeded:
        sys.exit(f"error: bounds exceeded: {', '.join(exceeded)}")


def result(name, usage):
    """Return a measurement with its bounds."""
    bound_seconds, bound_mb = BOUNDS[name]
    return {
        "name": name,
        "cpu_seconds": round(usage.cpu_seconds, 1),
        "bound_cpu_seconds": bound_seconds,
        "seconds": round(usage.seconds, 1),
        "mb": round(usage.mb),
        "bound_mb": bound_mb,
        "within_bounds": usage.cpu_seconds <= bound_seconds and usage.mb <= bound_mb,
    }


def recipes(folder):
    """Plan a thousand RLHF recipes that differ in one value, twice."""
    tiny = yaml.safe_load((ROOT / "config.yaml").read_text())["rlhf"]["recipes"]["tiny"]
    names = [f"s{number}" for number in range(RECIPES)]
    sweep = {name: {**tiny, "kl_coef": 0.1 + i / 1e4} for i, name in enumerate(names)}
    write_config(folder, {"rlhf": {"recipes": sweep}})
    targets = [f"output/rlhf/{name}" for name in names]
    for name in ("plan a thousand recipes", "plan them again"):
        yield name, snakemake(folder, "-n", *targets)


def rows(folder):
    """Import, split and tokenize a file of a million rows."""
    made, _ = make_rows(DISTINCT_ROWS, 10, random.Random(1))
    lines = [json.dumps(row) + "\n" for row in made]
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(islice(cycle(lines), ROWS))
    recipe = {"model": "tiny", "datasets": ["many"], "max_length": 96}
    dataset = {"path": str(folder / "rows.jsonl"), "format": "plain"}
    dataset["split"] = {"sft": 1, "reward": 0, "rlhf": 0}
    settings = {"datasets": {"many": dataset}, "sft": {"recipes": {"many": recipe}}}
    write_config(folder, {**settings, "deployments": {"cpu": {"threads": 1}}})
    snakemake(folder, "output/models/tiny.manifest.json")
    jobs = {"import": "data/many", "split": "split/many", "tokenize": "tokens/sft/many"}
    for verb, path in jobs.items():
        yield f"{verb} a million rows", snakemake(folder, f"output/{path}.manifest.json")


def files(folder):
    """Plan the import of ten thousand files, before and after their digests are known."""
    made, _ = make_rows(FILES, 10, random.Random(1))
    (folder / "files").mkdir()
    for number, row in enumerate(made):
        (folder / f"files/{number:05}.jsonl").write_text(json.dumps(row) + "\n")
    dataset = {"path": str(folder / "files"), "format": "plain"}
    write_config(folder, {"datasets": {"many": dataset}})
    # Files that have just been changed are not remembered.
    time.sleep(4)
    for name in ("first", "second"):
        usage = snakemake(folder, "-n", "output/data/many.manifest.json")
        yield f"{name} plan of ten thousand files", usage


def model(folder):
    """Fetch a model from a folder. Its weights are zeros that take no space in the source."""
    write_config(folder, {"models": {"large": {"path": str(folder / "large")}}})
    snakemake(folder, "output/models/tiny.manifest.json")
    source = folder / "large"
    source.mkdir()
    for path in (folder / "output/models/tiny").glob("*token*"):
        shutil.copy(path, source)
    (source / "config.json").write_text(json.dumps(MODEL))
    write_sparse_model(source)
    time.sleep(4)
    target = "output/models/large.manifest.json"
    yield "plan a model of 20 GB", snakemake(folder, "-n", target)
    yield "fetch a model of 20 GB", snakemake(folder, target)


MEASURES = {"recipes": recipes, "files": files, "model": model, "rows": rows}


def write_sparse_model(folder):
    """Write model.safetensors of MODEL, all zeros."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in model_shapes().items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def model_shapes():
    """Return the shapes of the weights of MODEL by name.

    torch is not imported: the peak memory of a process includes that of its parent.
    """
    width, inner, words = (
        MODEL[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    square = [width, width]
    layer = {f"self_attn.{letter}_proj": square for letter in "qkvo"}
    layer |= {"mlp.gate_proj": [inner, width], "mlp.up_proj": [inner, width]}
    layer |= {"mlp.down_proj": [width, inner]}
    layer |= {"input_layernorm": [width], "post_attention_layernorm": [width]}
    shapes = {
        f"model.layers.{number}.{name}.weight": shape
        for number in range(MODEL["num_hidden_layers"])
        for name, shape in layer.items()
    }
    ends = {"model.embed_tokens": [words, width], "model.norm": [width]}
    ends |= {"lm_head": [words, width]}
    return shapes | {f"{name}.weight": shape for name, shape in ends.items()}


def write_config(folder, settings):
    (folder / "load.yaml").write_text(yaml.safe_dump(settings))


def snakemake(folder, *arguments):
    """Run Snakemake in a folder; return the usage of it and of its jobs."""
    words = ["--cores", "1", "--configfile", "load.yaml"]
    command = ["snakemake", "-s", ROOT / "Snakefile", "--directory", folder, *arguments, *words]
    started = time.perf_counter()
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        if status:
            log.seek(0)
            sys.exit(log.read()[-5000:])
    return Usage(usage.ru_utime + usage.ru_stime, seconds, usage.ru_maxrss / 1024)


if __name__ == "__main__":
    main()
