"""Measure the speed and memory of RLOO and GRPO steps on two cores: make bench-rlhf

Compares train_rlhf with TRL's trainers with their fastest settings (trl_rlhf.py). Both sample from
the same small OPT model (train.py) for the same prompts of ../shared/data/hh_harmless in the same
order, score the responses by the same reward model, and make one update on all of them, in bf16
with fp32 master weights.

The actor of a case ends its responses with a probability that makes the mean length half the limit;
one in five reaches the limit. Lengths are random, so that the implementations work on equal lengths
up to noise: see mean_response_tokens. Tokens are response tokens.

The time of a step is the time between the ends of two steps; generate (responses), score (rewards,
log-probabilities, values) and train (the rest) are its sections. Memory is the peak above a process
that has imported everything and loaded nothing. Each measurement is a separate process; the
implementations take turns, each round draws new prompts and responses, and results are medians.
"""

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from train import (
    BETAS,
    MODEL,
    RATE,
    ROOT,
    ROWS,
    SEED,
    THREADS,
    VOCABULARIES,
    child,
    compare,
    make_job,
    make_tokenizer,
    peak_mb,
    read_rows,
    rss_mb,
    run_steps,
    spread,
)

PROMPT_LIMIT, MICRO_BATCH_TOKENS = 256, 8192
# (1 - exp(-x)) / x = 1/2: with an eos probability of x / limit, the mean length is limit / 2.
EOS_RATE = 1.594
KL_COEF = 0.1


class Case(NamedTuple):
    """A row of the table. limit: maximum number of tokens of a response."""

    vocab_size: str
    algorithm: str
    prompts: int
    num_generations: int
    limit: int

    def __str__(self):
        return (
            f"{self.vocab_size} {self.algorithm} {self.prompts}x{self.num_generations} {self.limit}"
        )


LARGE, SMALL = VOCABULARIES
CASES = (
    Case(SMALL, "rloo", 8, 4, 64),
    Case(SMALL, "grpo", 8, 4, 64),
    Case(LARGE, "grpo", 8, 4, 64),
)
SECTIONS = ("generate", "score", "train")


def main():
    """Prepare and measure; print progress to standard error and results to standard output."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=3, help="measurements of each case and implementation"
    )
    parser.add_argument("--warm-up", type=int, default=1, help="steps before the measured ones")
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument(
        "--trl-python", default=str(ROOT / ".venv-trl/bin/python"), help="Python that has TRL"
    )
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        task, folder, number = arguments.work
        print(json.dumps(TASKS[task](Path(folder), int(number))))
        return
    if not ROWS.exists():
        print(f"skipped: {ROWS} does not exist", file=sys.stderr)
        return
    rounds, warm_up, steps = arguments.rounds, arguments.warm_up, arguments.steps
    with tempfile.TemporaryDirectory() as folder:
        ours = [sys.executable, __file__, "--work"]
        commands = {
            "ours": [*ours, "ours"],
            "trl": [arguments.trl_python, str(Path(__file__).with_name("trl_rlhf.py"))],
        }
        plan = {"rounds": rounds, "steps": warm_up + steps}
        Path(folder, "plan.json").write_text(json.dumps(plan))
        for number in range(len(VOCABULARIES)):
            child([*ours, "prepare", folder, str(number)], folder)
        measured = {case: {name: [] for name in commands} for case in CASES}
        for turn in range(rounds):
            for case, implementations in measured.items():
                for name, results in implementations.items():
                    command = [*commands[name], str(Path(folder, str(case))), str(SEED + turn)]
                    results.append(child(command, folder))
                    print(f"round {turn + 1}: {case} {name}", file=sys.stderr)
        figures = {
            str(case): {
                name: summary(case, results, warm_up) for name, results in implementations.items()
            }
            for case, implementations in measured.items()
        }
    for implementations in figures.values():
        for figure in implementations.values():
            compare(implementations["ours"], figure, "sequences_per_second")
    about = {"cores": os.cpu_count(), "machine": platform.machine(), "threads": THREADS}
    about |= {"rounds": rounds, "warm_up": warm_up, "steps": steps}
    print(json.dumps({**about, "model": MODEL, "figures": figures}, indent=1))


def summary(case, results, warm_up):
    """Return medians and ranges over rounds; exit if a step has a wrong number of responses."""
    rounds = [result["steps"][warm_up:] for result in results]
    num_responses = case.prompts * case.num_generations
    if any(step["responses"] != num_responses for steps in rounds for step in steps):
        sys.exit(f"{case}: a step has a wrong number of responses")
    means = [
        {name: statistics.fmean(step[name] for step in steps) for name in steps[0]}
        for steps in rounds
    ]
    seconds = [sum(mean[section] for section in SECTIONS) for mean in means]
    figure = {
        f"{name}_per_second": spread([m[of] / s for m, s in zip(means, seconds, strict=True)])
        for name, of in (("sequences", "responses"), ("tokens", "tokens"))
    }
    memory = [result["peak_mb"] - result["idle_mb"] for result in results]
    figure["peak_mb_above_idle"] = spread(memory)
    for section in SECTIONS:
        figure[f"{section}_ms"] = spread([1000 * mean[section] for mean in means])
    tokens = statistics.fmean(mean["tokens"] / mean["responses"] for mean in means)
    return figure | {"mean_response_tokens": round(tokens, 1)}


def prepare(folder, number):
    """Write a folder for each case of a vocabulary: actor, reward model and prompts.

    SEED.json contains the case and the prompts of each step of a round, in the order of train_rlhf.
    """
    import torch

    from snakechat.data.dialogues import parse_prompt
    from snakechat.data.encoder import Encoder
    from snakechat.data.ragged_arrays import RaggedWriter
    from snakechat.modeling.batching import global_batches
    from snakechat.modeling.loading import load_scorer
    from snakechat.modeling.models import make_causal
    from snakechat.modeling.saving import save_model

    vocab_size = VOCABULARIES[number]
    plan = json.loads((folder / "plan.json").read_text())
    rows = read_rows()
    tokenizer = make_tokenizer(vocab_size, rows)
    base, reward = folder / f"{vocab_size} base", folder / f"{vocab_size} reward"
    save_model(make_causal(MODEL, tokenizer, SEED), tokenizer, base)
    torch.manual_seed(SEED)
    save_model(load_scorer(base, "fp32", tokenizer, new_head=True), tokenizer, reward)
    # Distinct prompts from the whole file; twice as many as needed, because long ones are skipped.
    texts = list(dict.fromkeys(prompt for prompt, *_ in rows))
    num_texts = 2 * plan["steps"] * max(case.prompts for case in CASES)
    encoded = Encoder(tokenizer, "dialogue").prompts(
        list(map(parse_prompt, texts[:: len(texts) // num_texts]))
    )
    prompts = [ids for ids in encoded if len(ids) <= PROMPT_LIMIT]
    for case in CASES:
        if case.vocab_size != vocab_size:
            continue
        case_folder = folder / str(case)
        case_folder.mkdir()
        (case_folder / "reward").symlink_to(reward)
        chosen = prompts[: case.prompts * plan["steps"]]
        actor = make_causal(MODEL, tokenizer, SEED)
        make_eos_likely(actor, chosen[:32], tokenizer.eos_token_id, EOS_RATE / case.limit)
        save_model(actor, tokenizer, case_folder / "actor")
        with RaggedWriter(case_folder, "train.prompt", len(tokenizer)) as writer:
            writer.write(chosen)
        for seed in range(SEED, SEED + plan["rounds"]):
            batches = global_batches(len(chosen), case.prompts, 1, seed)
            steps = [[chosen[row] for row in batch] for batch in batches]
            content = {**case._asdict(), "kl_coef": KL_COEF, "steps": steps}
            (case_folder / f"{seed}.json").write_text(json.dumps(content))


def make_eos_likely(model, prompts, eos_id, likelihood):
    """Change a model so that the mean probability of eos after prompts is likelihood."""
    import torch

    eos = model.get_output_embeddings().weight[eos_id]
    with torch.no_grad():
        # Iterate, because the bias of the last norm changes the other logits slightly, too.
        for _ in range(3):
            logits = torch.cat([model(torch.tensor([ids])).logits[0] for ids in prompts])
            current = logits.softmax(dim=-1)[:, eos_id].mean()
            missing = torch.tensor(likelihood).logit() - current.logit()
            model.model.decoder.final_layer_norm.bias += missing * eos / eos.square().sum()


def ours(folder, seed):
    """Run main of train_rlhf for the steps of a case."""
    from transformers import OPTForCausalLM, OPTForSequenceClassification  # noqa: F401

    program = importlib.import_module("train_rlhf")
    case, idle = read_case(folder, seed), rss_mb()
    with tempfile.TemporaryDirectory(dir=folder) as work:
        job = rlhf_job(case, folder, Path(work, "result"), seed)
        started = time.perf_counter()
        ends = run_steps(program, job, len(case.steps))
        lines = (job.log_folder / "times.jsonl").read_text().splitlines()
    steps = []
    for (start, end), line in zip(pairwise([started, *ends]), lines, strict=True):
        times = json.loads(line)
        step = {name: times[name] for name in ("generate", "score", "responses", "tokens")}
        steps.append({**step, "train": end - start - step["generate"] - step["score"]})
    return {"steps": steps, "idle_mb": idle, "peak_mb": peak_mb()}


def rlhf_job(case, folder, result, seed):
    """Return a job of train_rlhf with the default settings, except for those of the case."""
    import yaml

    from snakechat.config.loading import load_config
    from snakechat.config.rlhf import RlhfSettings

    config = load_config(yaml.safe_load((ROOT / "config.yaml").read_text()), ROOT, ROOT, {})
    job = make_job("rlhf", folder, result)
    settings = config.program_settings("rlhf", "1.3b") | dict(
        algorithm=case.algorithm,
        num_generations=case.num_generations,
        rollout_batch_size=case.prompts,
        global_batch_size=case.prompts * case.num_generations,
        max_prompt_length=PROMPT_LIMIT,
        max_response_length=case.limit,
        actor_learning_rate=RATE,
        critic_learning_rate=RATE,
        kl_in="loss" if case.algorithm == "grpo" else "rewards",
        kl_estimator="k3" if case.algorithm == "grpo" else "k1",
        kl_coef=case.kl_coef,
        lora_rank=0,
        adam_betas=BETAS,
        weight_decay=0.0,
        dtype="bf16",
        seed=seed,
    )
    job.settings = RlhfSettings(**settings)
    # make_job has a limit for training alone.
    job.placement = replace(job.placement, micro_batch_tokens=MICRO_BATCH_TOKENS)
    job.inputs = {name: folder / name for name in ("actor", "reward")} | {"tokens": folder}
    return job


def read_case(folder, seed):
    """Return the case and the prompts of a round, which prepare wrote."""
    return SimpleNamespace(**json.loads((folder / f"{seed}.json").read_text()))


TASKS = {"prepare": prepare, "ours": ours}


if __name__ == "__main__":
    main()
