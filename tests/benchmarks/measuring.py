"""What train.py and rlhf.py share: a small OPT, rows of hh_harmless, and interleaved measurements.

trl_rlhf.py imports it in an environment of its own, with the standard library alone.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for name in ("tests", "scripts"):
    sys.path.insert(0, str(ROOT / name))

SHARED = ROOT.parent / "shared/data"
ROWS = SHARED / "hh_harmless/train.parquet"
# The tokenizer of OPT, and one that is trained on the rows.
VOCABULARIES = ("50,272", "8,192")
MODEL = {
    "model_type": "opt",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "word_embed_proj_dim": 256,
    "num_attention_heads": 4,
    "ffn_dim": 1024,
    "max_position_embeddings": 512,
    "dropout": 0.0,
}
THREADS, SEED, RATE, BETAS = 2, 1, 1e-5, (0.9, 0.95)
SETTINGS = {"dtype": "bf16", "adam_betas": BETAS, "weight_decay": 0.0}


def run(description, work, methods, cases, unit, rounds):
    """Run a benchmark, or one piece of its work in this process.

    Args:
        description: Docstring of the benchmark.
        work: {name: function} of the words behind a name on the command line; returns JSON values.
            `prepare` gets a vocabulary, a folder and the number of rounds.
        methods: {name: command}. It gets the folder, a case and the number of the round; returns
            `measured`.
        cases: Names of the cases, which start with their vocabulary.
        unit: What is counted.
        rounds: Default of the number of rounds.
    """
    if sys.argv[1:2] and sys.argv[1] in work:
        print(json.dumps(work[sys.argv[1]](*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="measurements of each case")
    rounds = parser.parse_args().rounds
    if not ROWS.exists():
        print(f"skipped: {ROWS} does not exist", file=sys.stderr)
        return
    results = {case: {method: [] for method in methods} for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        for vocabulary in VOCABULARIES:
            in_process(sys.executable, sys.argv[0], "prepare", vocabulary, folder, str(rounds))
        for turn, case, method in product(range(rounds), cases, methods):
            results[case][method].append(in_process(*methods[method], folder, case, str(turn)))
            print(f"round {turn + 1}: {case} {method}", file=sys.stderr)
    about = {"cores": os.cpu_count(), "machine": platform.machine(), "threads": THREADS}
    print(json.dumps({**about, "rounds": rounds, "model": MODEL}))
    for case, of_methods in results.items():
        for record in records_of(case, of_methods, unit):
            print(json.dumps(record))


def in_process(*command):
    """Run a command in a new process and return its last line of output, parsed as JSON."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    if process.returncode:
        sys.exit(process.stderr)
    return json.loads(process.stdout.splitlines()[-1])


def measured(ends, warm_up, number, idle_mb, **means):
    """Return the measurement of a process.

    Args:
        ends: Times at which the steps ended.
        warm_up: Number of the first steps, which are not measured.
        number: What is counted, in the measured steps.
        idle_mb: Memory before anything was loaded.
        means: Other figures, of which records have the mean.
    """
    seconds, memory = ends[-1] - ends[warm_up - 1], rss_mb("VmHWM") - idle_mb
    return {"per_second": number / seconds, "peak_mb_above_idle": memory, "means": means}


def records_of(case, methods, unit):
    """Return a record of each method: medians, ranges, and ratios of Snakechat's medians to them.

    methods: {method: measurements}.
    """
    records = {}
    for method, results in methods.items():
        records[method] = {
            "case": case,
            "method": method,
            f"{unit}_per_second": spread([each["per_second"] for each in results]),
            "peak_mb_above_idle": spread([each["peak_mb_above_idle"] for each in results]),
        }
        for name in results[0]["means"]:
            mean = statistics.fmean(each["means"][name] for each in results)
            records[method][name] = round(mean, 5)
    for record in records.values():
        for name, what in (("speed", f"{unit}_per_second"), ("memory", "peak_mb_above_idle")):
            ratio = records["ours"][what]["median"] / record[what]["median"]
            record[f"{name}_of_ours_over_this"] = round(ratio, 2)
    return records.values()


def spread(values):
    functions = {"median": statistics.median, "min": min, "max": max}
    return {name: round(function(values), 2) for name, function in functions.items()}


def rss_mb(kind="VmRSS"):
    """Return the resident memory of this process in MB; VmHWM is its peak.

    getrusage would include the peak of its parent.
    """
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{kind}:\s+(\d+)", status)[1]) / 1024


def read_rows():
    """Return the texts (prompt, chosen, rejected) of each row."""
    import pyarrow.parquet as pq

    table = pq.ParquetFile(ROWS).read(["prompt", "chosen", "rejected"])
    return [tuple(row.values()) for row in table.to_pylist()]


def make_tokenizer(vocabulary, rows):
    """Return the tokenizer of OPT, or one with a vocabulary of this size trained on the rows."""
    from init_model import train_tokenizer
    from snakechat.data.tokenizers import load_tokenizer

    if vocabulary == VOCABULARIES[0]:
        return load_tokenizer(SHARED / "tokenizer_opt")
    texts = (text for row in rows for text in row)
    return train_tokenizer(texts, int(vocabulary.replace(",", "")))
