"""Benchmark of tokenization: rate, memory and bytes on disk (make bench-data).

Compares tokenize_phase with (a) the tokenizers library alone, on the same texts in memory, and (b)
one call per sample, padded to 512 tokens and saved by torch, as in DeepSpeed-Chat. Uses the texts
of ../shared/data/hh_harmless and the OPT tokenizer if they exist, generated texts otherwise. The
measurements alternate, each in a new process; rates are medians. Prints JSON.
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
import time
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared/data"
sys.path.insert(0, str(ROOT / "scripts"))

FIELDS = {
    "sft": ("prompt", "chosen"),
    "reward": ("prompt", "chosen", "rejected"),
    "rlhf": ("prompt",),
}
# Number of rows, and number of runs for the median.
SIZES = {16_000: 3, 160_000: 3, 1_000_000: 1}
# The rates of (a) and (b) do not depend on the number of rows.
RAW_ROWS, SINGLE_ROWS = 16_000, 2_000
LIMIT = 512


def main():
    """Measure each size and phase; print one line for each to standard error."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        what, phase, rows, folder = arguments.measure
        print(json.dumps(MEASURES[what](phase, int(rows), Path(folder))))
        return
    results = []
    with tempfile.TemporaryDirectory() as folder:
        source = prepare(Path(folder))
        for rows, runs in SIZES.items():
            for phase in FIELDS:
                measurements = {what: [] for what in MEASURES}
                for turn in range(max(runs, 3)):
                    for what, measured in measurements.items():
                        if what != "ours" or turn < runs:
                            measured.append(measure(what, phase, rows, folder))
                results.append(summary(rows, phase, measurements))
                print(line(results[-1]), file=sys.stderr)
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "texts": source}
    print(json.dumps({**machine, "results": results}, indent=1))


def prepare(folder):
    """Write records of all sizes and a tokenizer into a folder. Returns the source of the texts."""
    from snakechat.data.dialogues import parse_prompt
    from snakechat.data.records import RecordWriter

    if SHARED.exists():
        import pyarrow.parquet as pq

        (folder / "tokenizer").symlink_to(SHARED / "tokenizer_opt")
        rows = pq.ParquetFile(SHARED / "hh_harmless/train.parquet").read().to_pylist()
        source = "hh_harmless, repeated"
    else:
        import random

        from init_model import train_tokenizer
        from snakechat.data.toy import make_rows

        rows, _ = make_rows(16_000, 10, random.Random(1))
        texts = (row[name] for row in rows for name in ("prompt", "chosen", "rejected"))
        train_tokenizer(texts, 4_000).save_pretrained(folder / "tokenizer")
        source = "generated"
    for size in SIZES:
        with RecordWriter(folder / f"{size}.parquet") as writer:
            for row in islice(cycle(rows), size):
                writer.write((parse_prompt(row["prompt"]), row["chosen"], row["rejected"]))
    return source


def measure(what, phase, rows, folder):
    """Run a measurement in a new process."""
    command = [sys.executable, __file__, "--measure", what, phase, str(rows), folder]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def ours(phase, rows, folder):
    """tokenize_phase: read, tokenize, write, count."""
    import numpy as np

    import tokenize_phase

    with tempfile.TemporaryDirectory(dir=folder) as work:
        result, records, split = (Path(work, name) for name in ("result", "records", "split"))
        for path in (result, records, split):
            path.mkdir()
        (records / "train.parquet").symlink_to(folder / f"{rows}.parquet")
        np.save(split / f"{phase}.train.npy", np.arange(rows))
        np.save(split / f"{phase}.eval.npy", np.arange(1))
        settings = {"datasets": [["set", 1]], "template": "dialogue", "seed": 1}
        settings |= {"max_length": LIMIT, "max_prompt_length": 256}
        job = SimpleNamespace(
            spec={"rule": f"tokenize_{phase}"},
            settings=SimpleNamespace(**settings),
            inputs={
                "records.set": records,
                "rows.set": split,
                "tokenizer": folder / "tokenizer",
            },
            result=result,
            facts={},
        )
        started = time.perf_counter()
        tokenize_phase.main(job)
        seconds = time.perf_counter() - started
        stats = json.loads((result / "stats.json").read_text())["train"]
        return {
            "rate": rows / seconds,
            "bytes": sum(path.stat().st_size for path in result.glob("train.*.npy")),
            "tokens": sum(field["sum"] for field in stats["tokens"].values()),
            "rows": stats["rows"],
            "peak_mb": peak_mb(),
        }


def peak_mb():
    """Return the peak memory of this process. getrusage would include that of its parent."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024


def raw(phase, _, folder):
    """(a) The tokenizers library on the same texts, in batches of 1,000."""
    from tokenizers import Tokenizer

    from snakechat.data.records import read_texts

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
    rows = list(read_texts(folder / f"{RAW_ROWS}.parquet"))
    texts = [text for row in rows for text in row[: len(FIELDS[phase])]]
    started = time.perf_counter()
    for start in range(0, len(texts), 1000):
        tokenizer.encode_batch(texts[start : start + 1000])
    return {"rate": len(rows) / (time.perf_counter() - started)}


def single(phase, _, folder):
    """(b) One call per sample, padded; the encodings are saved by torch."""
    import torch

    from snakechat.data.records import read_texts
    from snakechat.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(folder / "tokenizer")
    rows = list(islice(read_texts(folder / f"{RAW_ROWS}.parquet"), SINGLE_ROWS))
    started = time.perf_counter()
    encodings = []
    padded = {"max_length": LIMIT, "padding": "max_length", "truncation": True}
    for prompt, *responses in rows:
        if phase == "rlhf":
            encodings.append(tokenizer(prompt, return_tensors="pt"))
        else:
            for response in responses[: len(FIELDS[phase]) - 1]:
                encodings.append(tokenizer(prompt + response, return_tensors="pt", **padded))
    path = folder / "single.pt"
    torch.save(encodings, path)
    return {"rate": len(rows) / (time.perf_counter() - started), "bytes": path.stat().st_size}


MEASURES = {"ours": ours, "raw": raw, "single": single}


def summary(rows, phase, measurements):
    """Return the results of a size and phase: medians over the runs."""

    def median(what, name):
        return statistics.median(result[name] for result in measurements[what])

    return {
        "rows": rows,
        "phase": phase,
        "rows_per_second": round(median("ours", "rate")),
        "of_raw_rate": round(median("ours", "rate") / median("raw", "rate"), 3),
        "times_single_rate": round(median("ours", "rate") / median("single", "rate"), 1),
        "bytes": median("ours", "bytes"),
        "bytes_per_token_beyond_32_per_row": round(
            (median("ours", "bytes") - 32 * median("ours", "rows")) / median("ours", "tokens"), 3
        ),
        "single_bytes_per_row": round(median("single", "bytes") / SINGLE_ROWS),
        "peak_mb": round(max(result["peak_mb"] for result in measurements["ours"])),
    }


def line(results):
    """Return results as a line of text."""
    return "  ".join(
        f"{name} {value:,}" if name != "phase" else value for name, value in results.items()
    )


if __name__ == "__main__":
    main()
