"""Measure the speed and memory of PPO, RLOO and GRPO steps on two cores: make bench-rlhf

Compares train_rlhf with (a) the algorithm of DeepSpeed-Chat for PPO and (b) TRL's trainers with
their fastest settings for RLOO and GRPO (trl_rlhf.py; TRL 1.16 has no PPO). All of them sample from
the same small OPT model (train.py) for the same prompts of ../shared/data/hh_harmless in the same
order, score the responses by the same reward model, and make one update on all of them, in bf16
with fp32 master weights. (a) is implemented below: prompts padded to 256 tokens on the left, four
forward passes over padded sequences with logits or values at all positions, losses over the same
positions. Unlike DeepSpeed-Chat it samples: with greedy decoding, the lengths of responses would
differ between the implementations.

The actor of a case ends its responses with a probability that makes the mean length half the limit;
one in five reaches the limit. Lengths are random, so that the implementations work on equal lengths
up to noise, which the table shows. Tokens are response tokens.

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

from data import ROOT, peak_mb
from train import (
    BATCH,
    BETAS,
    MODEL,
    RATE,
    ROWS,
    SEED,
    THREADS,
    VOCABULARIES,
    Clock,
    Masters,
    child,
    compare,
    make_job,
    make_tokenizer,
    read_rows,
    rss_mb,
    run_steps,
    spread,
)

PROMPT_LIMIT, MICRO_BATCH_TOKENS = 256, 8192
# (1 - exp(-x)) / x = 1/2: with an eos probability of x / limit, the mean length is limit / 2.
EOS_RATE = 1.594
KL_COEF, CLIP_RANGE, SCORE_CLIP, GAE_LAMBDA = 0.1, 0.2, 5.0, 0.95


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
    Case(SMALL, "ppo", 8, 1, 64),
    Case(SMALL, "ppo", 8, 1, 256),
    Case(SMALL, "ppo", 32, 1, 64),
    Case(LARGE, "ppo", 8, 1, 64),
    Case(SMALL, "rloo", 8, 4, 64),
    Case(SMALL, "grpo", 8, 4, 64),
    Case(LARGE, "grpo", 8, 4, 64),
)
SECTIONS = ("generate", "score", "train")
BASELINES = {"ppo": "deepspeed_chat", "rloo": "trl", "grpo": "trl"}


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
            "deepspeed_chat": [*ours, "deepspeed_chat"],
            "trl": [arguments.trl_python, str(Path(__file__).with_name("trl_rlhf.py"))],
        }
        plan = {"rounds": rounds, "steps": warm_up + steps}
        Path(folder, "plan.json").write_text(json.dumps(plan))
        for number in range(len(VOCABULARIES)):
            child([*ours, "prepare", folder, str(number)], folder)
        measured = {case: {"ours": [], BASELINES[case.algorithm]: []} for case in CASES}
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
    print(table(figures), file=sys.stderr)
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


def table(figures):
    """Return the results as a table of text."""
    lines = [
        f"{'case':23}{'implementation':15}{'sequences/s':>12}{'min':>8}{'max':>8}{'tokens/s':>10}"
        f"{'generate':>10}{'score':>8}{'train':>8} ms{'MB':>5}{'response':>8}{'ours, times':>13}"
    ]
    for case, implementations in figures.items():
        for name, figure in implementations.items():
            rate, tokens = (figure[f"{unit}_per_second"] for unit in ("sequences", "tokens"))
            times = [figure[f"{section}_ms"]["median"] for section in SECTIONS]
            lines.append(
                f"{case:23}{name:15}{rate['median']:12.2f}{rate['min']:8.2f}{rate['max']:8.2f}"
                f"{tokens['median']:10,.0f}{times[0]:10,.0f}{times[1]:8,.0f}{times[2]:8,.0f}"
                f"{figure['peak_mb_above_idle']['median']:8,.0f}"
                f"{figure['mean_response_tokens']:8.1f}{figure['speed_of_ours_over_this']:13.2f}"
            )
    return "\n".join(lines)


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


def deepspeed_chat(folder, seed):
    """Run the steps of a case with the algorithm of DeepSpeed-Chat.

    Shapes: B sequences of T tokens (prompt and response); R tokens of the longest response.
    """
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        OPTForCausalLM,  # noqa: F401 imported lazily otherwise, after idle memory was measured
        OPTForSequenceClassification,  # noqa: F401
    )

    torch.manual_seed(seed)
    case = read_case(folder, seed)
    pad_id = AutoTokenizer.from_pretrained(folder / "actor").pad_token_id
    idle = rss_mb()
    actor, ref = (load(AutoModelForCausalLM, folder / "actor") for _ in range(2))
    critic, reward = (load(AutoModelForSequenceClassification, folder / "reward") for _ in range(2))
    actor_masters, critic_masters = (Masters(list(model.parameters())) for model in (actor, critic))
    clock = Clock()
    for prompts in case.steps:
        with torch.no_grad():
            ids, mask = padded_left(prompts, pad_id)
            ids = actor.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=case.limit,
                pad_token_id=pad_id,
            )
            mask = (ids != pad_id).long()
            response_mask = mask[:, PROMPT_LIMIT:]
            clock.take("generate", responses=len(ids), tokens=response_mask.sum().item())

            passes = [*zip(*(each.split(BATCH) for each in (ids, mask)), strict=True)]

            def in_passes(function, model, passes=passes):
                return torch.cat([function(model, *sequences) for sequences in passes])

            old_logprobs, ref_logprobs = (in_passes(logprobs_of, model) for model in (actor, ref))
            ends = mask.cumsum(dim=1).argmax(dim=1)
            scores = in_passes(all_values, reward).gather(1, ends[:, None]).squeeze(1)
            old_values = in_passes(values_of, critic)
            clock.take("score")

            rewards = -KL_COEF * (old_logprobs - ref_logprobs) * response_mask
            rewards[range(len(rewards)), response_mask.sum(dim=1) - 1] += scores.clamp(
                -SCORE_CLIP, SCORE_CLIP
            )
            advantages = advantages_of(rewards, old_values * response_mask)
            returns = advantages + old_values

        tables = (old_logprobs, old_values, advantages, returns, response_mask)
        parts = [*zip(*(table.split(BATCH) for table in tables), strict=True)]
        num_tokens = response_mask.sum()
        for sequences, part in zip(passes, parts, strict=True):
            policy_loss_of(actor, sequences, *part, num_tokens).backward()
        actor_masters.step()
        for sequences, part in zip(passes, parts, strict=True):
            value_loss_of(critic, sequences, *part, num_tokens).backward()
        critic_masters.step()
        clock.take("train")
        clock.end()
    return {"steps": clock.steps, "idle_mb": idle, "peak_mb": peak_mb()}


def policy_loss_of(
    actor, sequences, old_logprobs, old_values, advantages, returns, mask, num_tokens
):
    """Return the clipped loss of a pass, as a fraction of the mean over all response tokens."""
    import torch

    ratio = torch.exp(logprobs_of(actor, *sequences) - old_logprobs)
    clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    return (loss * mask).sum() / num_tokens


def value_loss_of(
    critic, sequences, old_logprobs, old_values, advantages, returns, mask, num_tokens
):
    """Return the clipped loss of the critic in a pass, likewise."""
    import torch

    values = values_of(critic, *sequences)
    clipped = old_values + (values - old_values).clamp(-CLIP_RANGE, CLIP_RANGE)
    loss = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) / 2
    return (loss * mask).sum() / num_tokens


def load(kind, folder):
    """Load a model in bf16."""
    import torch

    return kind.from_pretrained(folder, dtype=torch.bfloat16)


def padded_left(prompts, pad_id):
    """Return input_ids and attention_mask [B, 256] of prompts."""
    import torch

    paddings = [PROMPT_LIMIT - len(ids) for ids in prompts]
    ids = [[pad_id] * padding + ids for padding, ids in zip(paddings, prompts, strict=True)]
    mask = [[0] * padding + [1] * (PROMPT_LIMIT - padding) for padding in paddings]
    return torch.tensor(ids), torch.tensor(mask)


def logprobs_of(model, ids, mask):
    """Return log-probabilities of response tokens [B, R], from logits of all positions [B, T]."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    logprobs = logits.log_softmax(dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return logprobs[:, PROMPT_LIMIT - 1 :]


def all_values(model, ids, mask):
    """Return the output of the score head at each position [B, T]."""
    hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    return model.score(hidden).squeeze(-1)


def values_of(model, ids, mask):
    """Return the value before each response token [B, R]."""
    return all_values(model, ids, mask)[:, PROMPT_LIMIT - 1 : -1]


def advantages_of(rewards, values):
    """Return advantages [B, R] by GAE with gamma 1; rewards and values are 0 after a response."""
    import torch

    advantages, next_advantage, next_value = [], 0, 0
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + next_value - values[:, t]
        next_advantage, next_value = delta + GAE_LAMBDA * next_advantage, values[:, t]
        advantages.append(next_advantage)
    return torch.stack(advantages[::-1], dim=1)


TASKS = {"prepare": prepare, "ours": ours, "deepspeed_chat": deepspeed_chat}


if __name__ == "__main__":
    main()
