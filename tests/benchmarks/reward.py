"""Accuracy of a small reward model on real preference data (make bench-reward).

Four-fold cross-validation on ../shared/data/hh_harmless: an OPT of 5.5 million random weights
trains on three quarters of the pairs for two epochs and ranks the fourth. The baseline chooses the
longer response.
"""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from data import ROOT, SHARED
from train import MODEL

FOLDS = 4
RECIPE = {
    "max_length": 512,
    "epochs": 2,
    "global_batch_size": 16,
    "learning_rate": 3e-4,
    "min_lr_ratio": 0.1,
    "warmup_steps": 10,
    "dtype": "bf16",
}


def main():
    """Train a reward model for each fold and print the accuracies as JSON."""
    source = SHARED / "hh_harmless"
    if not source.exists():
        print(f"skipped: {source} does not exist", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as folder:
        names = [f"fold{number}" for number in range(FOLDS)]
        config = Path(folder, "folds.json")
        config.write_text(json.dumps(configuration(source, folder, names)))
        build = ["snakemake", "--cores", "2", "-s", ROOT / "Snakefile", "--directory", folder]
        targets = [f"output/reward/{name}" for name in names]
        subprocess.run([*build, *targets, "--configfile", config], check=True, stdout=sys.stderr)
        metrics = [
            json.loads(Path(folder, f"output/eval/reward/{name}/metrics.json").read_text())
            for name in names
        ]
    pairs = [fold["pairs"] for fold in metrics]
    results = {"pairs": sum(pairs)}
    for name in ("accuracy", "longer_wins_accuracy", "ties", "calibration_error"):
        values = [fold[name] for fold in metrics]
        results[name] = {"mean": float(np.average(values, weights=pairs)), "folds": values}
    accuracy = results["accuracy"]["mean"]
    margin = 1.96 * math.sqrt(accuracy * (1 - accuracy) / results["pairs"])
    results["accuracy"]["interval_95"] = [accuracy - margin, accuracy + margin]
    print(json.dumps({"model": MODEL, "recipe": RECIPE, **results}, indent=1))


def configuration(source, folder, names):
    """Write the dataset of each fold; return the config of datasets, models and recipes."""
    whole = pa.concat_tables(pq.read_table(path) for path in sorted(source.glob("t*.parquet")))
    order = np.random.default_rng(0).permutation(len(whole))
    fold = np.arange(len(whole)) % FOLDS
    tiny = yaml.safe_load((ROOT / "config.yaml").read_text())["reward"]["recipes"]["tiny"]
    config = {"datasets": {}, "models": {}, "reward": {"recipes": {}}}
    for number, name in enumerate(names):
        path = Path(folder, "data", name)
        path.mkdir(parents=True)
        pq.write_table(whole.take(order[fold != number]), path / "train.parquet")
        pq.write_table(whole.take(order[fold == number]), path / "test.parquet")
        config["datasets"][name] = {
            "path": str(path),
            "train": "train.parquet",
            "eval": "test.parquet",
            "format": "plain",
            "split": {"sft": 0, "reward": 1, "rlhf": 0},
        }
        # The tokenizer is not trained on the evaluation pairs either.
        tokenizer = {"train_on": name, "vocab_size": 8192}
        config["models"][name] = {"tokenizer": tokenizer, "init": MODEL}
        config["reward"]["recipes"][name] = {
            "model": name,
            "datasets": [name],
            **RECIPE,
            "placement": tiny["placement"],
        }
    return config


if __name__ == "__main__":
    main()
