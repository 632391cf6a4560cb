"""How fast steps of PPO, RLOO and GRPO are on two cores, and in how much memory: make bench-rlhf

Ours, PPO beside (a) DeepSpeed-Chat's way, RLOO and GRPO beside (b) TRL's trainers with the settings
that serve them best (trl_rlhf.py; TRL 1.16 has no PPO). All ask the same small OPT, train.py's, for
responses to the same prompts of ../shared/data/hh_harmless, in the same order, have them scored by
the same reward model and update on all of them at once, in bf16 with fp32 weights behind. (a) is
written out below: prompts padded to 256 on the left, four passes over whole padded sequences with
logits or values at all positions, losses over the same, but for its greedy decoding, which would
leave each way other responses to work on.

The actor of a case is made to end its responses: eos is as likely as makes them half as long as the
limit in the mean, and one in five reaches it. Where each ends is chance, so that responses are as
long in all ways but for noise, which the table shows. Tokens are those of the responses.

A step's time is that between ends of steps; generate (responses), score (rewards, log-probabilities,
values) and train (the rest) are parts of it. Memory is the peak above a process that has imported
all and loaded nothing. Each measurement is a process of its own; they take turns, each round draws
prompts and responses anew, figures are medians.
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
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from data import ROOT, peak_mb
from train import (
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
    rss_mb,
    run_steps,
    spread,
)

PROMPT_LIMIT, PASS_TOKENS = 256, 8192
# (1 - exp(-x)) / x is a half: with eos as likely as x / limit, a response is half the limit long.
ENDING = 1.594
KL_COEF, CLIP_RANGE, SCORE_CLIP, GAE_LAMBDA = 0.1, 0.2, 5.0, 0.95


class Case(NamedTuple):
    """One line of the table: so many responses to each of so many prompts a step, of up to limit."""

    words: str
    algorithm: str
    prompts: int
    num_generations: int
    limit: int

    def __str__(self):
        return f"{self.words} {self.algorithm} {self.prompts}x{self.num_generations} {self.limit}"


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
PARTS = ("generate", "score", "train")
OTHERS = {"ppo": "deepspeed_chat", "rloo": "trl", "grpo": "trl"}


def main():
    """Prepare, measure in turns; a line for each case and way goes to standard error."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="measurements of a case and way")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before those timed")
    parser.add_argument("--steps", type=int, default=3, help="steps timed")
    parser.add_argument(
        "--trl-python", default=str(ROOT / ".venv-trl/bin/python"), help="Python that has TRL"
    )
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        what, folder, number = arguments.work
        print(json.dumps(WORK[what](Path(folder), int(number))))
        return
    if not ROWS.exists():
        print(f"skipped: {ROWS} is not there", file=sys.stderr)
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
        found = {case: {"ours": [], OTHERS[case.algorithm]: []} for case in CASES}
        for turn in range(rounds):
            for case, ways in found.items():
                for way, results in ways.items():
                    command = [*commands[way], str(Path(folder, str(case))), str(SEED + turn)]
                    results.append(child(command, folder))
                    print(f"round {turn + 1}: {case} {way}", file=sys.stderr)
        figures = {
            str(case): {way: summary(case, results, warm_up) for way, results in ways.items()}
            for case, ways in found.items()
        }
    for ways in figures.values():
        for figure in ways.values():
            compare(ways["ours"], figure, "sequences_per_second")
    print(table(figures), file=sys.stderr)
    about = {"cores": os.cpu_count(), "machine": platform.machine(), "threads": THREADS}
    about |= {"rounds": rounds, "warm_up": warm_up, "steps": steps}
    print(json.dumps({**about, "model": MODEL, "figures": figures}, indent=1))


def summary(case, results, warm_up):
    """Medians and ranges over the rounds of a way. Stops where a step has not all its responses."""
    rounds = [result["steps"][warm_up:] for result in results]
    if any(step["responses"] != case.prompts * case.num_generations for steps in rounds for step in steps):
        sys.exit(f"{case}: a way has too few responses or too many")
    means = [
        {name: statistics.fmean(step[name] for step in steps) for name in steps[0]}
        for steps in rounds
    ]
    seconds = [sum(mean[part] for part in PARTS) for mean in means]
    figure = {
        f"{name}_per_second": spread([m[of] / s for m, s in zip(means, seconds, strict=True)])
        for name, of in (("sequences", "responses"), ("tokens", "tokens"))
    }
    memory = [result["peak_mb"] - result["idle_mb"] for result in results]
    figure["peak_mb_above_idle"] = spread(memory)
    for part in PARTS:
        figure[f"{part}_ms"] = spread([1000 * mean[part] for mean in means])
    tokens = statistics.fmean(mean["tokens"] / mean["responses"] for mean in means)
    return figure | {"mean_response_tokens": round(tokens, 1)}


def table(figures):
    """Figures as lines of text."""
    lines = [
        f"{'case':23}{'way':15}{'sequences/s':>12}{'min':>8}{'max':>8}{'tokens/s':>10}"
        f"{'generate':>10}{'score':>8}{'train':>8} ms{'MB':>5}{'response':>8}{'ours, times':>13}"
    ]
    for case, ways in figures.items():
        for way, figure in ways.items():
            rate, tokens = (figure[f"{name}_per_second"] for name in ("sequences", "tokens"))
            parts = [figure[f"{part}_ms"]["median"] for part in PARTS]
            lines.append(
                f"{case:23}{way:15}{rate['median']:12.2f}{rate['min']:8.2f}{rate['max']:8.2f}"
                f"{tokens['median']:10,.0f}{parts[0]:10,.0f}{parts[1]:8,.0f}{parts[2]:8,.0f}"
                f"{figure['peak_mb_above_idle']['median']:8,.0f}"
                f"{figure['mean_response_tokens']:8.1f}{figure['speed_of_ours_over_this']:13.2f}"
            )
    return "\n".join(lines)


def prepare(folder, number):
    """A folder for each case of a vocabulary: actor, reward, prompts, and prompts of each step.

    SEED.json: of each round, a case with the prompts of each step, in ours's own order.
    """
    import torch

    from snakechat.data.records import read_records
    from snakechat.data.tokenizers import Encoder
    from snakechat.data.tokens import RaggedWriter
    from snakechat.modeling.batching import global_batches
    from snakechat.modeling.models import load_scorer, make_causal, save_model

    words = VOCABULARIES[number]
    plan = json.loads((folder / "plan.json").read_text())
    rows = list(read_records(ROWS))
    tokenizer = make_tokenizer(words, rows)
    base, reward = folder / f"{words} base", folder / f"{words} reward"
    save_model(make_causal(MODEL, tokenizer, SEED), tokenizer, base)
    torch.manual_seed(SEED)
    save_model(load_scorer(base, "fp32", tokenizer, new_head=True), tokenizer, reward)
    # From all over the file, each prompt once; twice as many as a case takes: long ones go.
    texts = list(dict.fromkeys(prompt for prompt, *_ in rows))
    wanted = 2 * plan["steps"] * max(case.prompts for case in CASES)
    encoded = Encoder(tokenizer, "dialogue").prompts(texts[:: len(texts) // wanted])
    prompts = [ids for ids in encoded if len(ids) <= PROMPT_LIMIT]
    for case in CASES:
        if case.words != words:
            continue
        place = folder / str(case)
        place.mkdir()
        (place / "reward").symlink_to(reward)
        chosen = prompts[: case.prompts * plan["steps"]]
        actor = make_causal(MODEL, tokenizer, SEED)
        make_eos_likely(actor, chosen[:32], tokenizer.eos_token_id, ENDING / case.limit)
        save_model(actor, tokenizer, place / "actor")
        with RaggedWriter(place, "train.prompt", len(tokenizer)) as writer:
            writer.write(chosen)
        for seed in range(SEED, SEED + plan["rounds"]):
            batches = global_batches(len(chosen), case.prompts, 1, seed)
            steps = [[chosen[row] for row in batch] for batch in batches]
            about = {**case._asdict(), "kl_coef": KL_COEF, "steps": steps}
            (place / f"{seed}.json").write_text(json.dumps(about))


def make_eos_likely(model, prompts, eos_id, likelihood):
    """Let a model end a response at each token with this likelihood, in the mean over prompts."""
    import torch

    eos = model.get_output_embeddings().weight[eos_id]
    with torch.no_grad():
        # What is added to the last norm's output changes the other logits too, a little.
        for _ in range(3):
            logits = torch.cat([model(torch.tensor([ids])).logits[0] for ids in prompts])
            now = logits.softmax(dim=-1)[:, eos_id].mean()
            missing = torch.tensor(likelihood).logit() - now.logit()
            model.model.decoder.final_layer_norm.bias += missing * eos / eos.square().sum()


def ours(folder, seed):
    """The training program's own main, until the steps are done."""
    from transformers import OPTForCausalLM, OPTForSequenceClassification  # noqa: F401

    program = importlib.import_module("train_rlhf")
    # They are recorded by the training of a reward model, which there was not.
    program.check_probes = lambda *_: None
    idle, case = rss_mb(), read_case(folder, seed)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        job = rlhf_job(case, folder, Path(work, "result"), seed)
        started = time.perf_counter()
        ends = run_steps(program, job, len(case.steps))
        lines = (job.log_folder / "times.jsonl").read_text().splitlines()
    steps = []
    for (start, end), line in zip(pairwise([started, *ends]), lines, strict=True):
        told = json.loads(line)
        step = {name: told[name] for name in ("generate", "score", "responses", "tokens")}
        steps.append({**step, "train": end - start - step["generate"] - step["score"]})
    return {"steps": steps, "idle_mb": idle, "peak_mb": peak_mb()}


def rlhf_job(case, folder, result, seed):
    """A job as the program gets it: the stage's defaults, but for what this benchmark says."""
    job = make_job("rlhf", folder, result)
    vars(job.settings).update(
        algorithm=case.algorithm,
        num_generations=case.num_generations,
        rollout_batch_size=case.prompts,
        global_batch_size=case.prompts * case.num_generations,
        max_prompt_length=PROMPT_LIMIT,
        max_response_length=case.limit,
        actor_learning_rate=RATE,
        critic_learning_rate=RATE,
        kl_in="loss" if case.algorithm == "grpo" else "rewards",
        kl_coef=case.kl_coef,
        seed=seed,
    )
    job.placement["micro_batch_tokens"] = PASS_TOKENS
    # The tokens of the reward phase are those of the probes.
    tokens = dict.fromkeys(("tokens", "tokens.reward"), folder)
    job.inputs = {"actor": folder / "actor", "reward": folder / "reward", **tokens}
    return job


def read_case(folder, seed):
    """A case of a round: what prepare wrote of it."""
    return SimpleNamespace(**json.loads((folder / f"{seed}.json").read_text()))


def deepspeed_chat(folder, seed):
    """(a) DeepSpeed-Chat's step in a plain loop.

    Shapes: B sequences of T tokens, prompt and response; R tokens of the longest response.
    """
    import torch
    from transformers import AutoTokenizer, OPTForCausalLM, OPTForSequenceClassification

    torch.manual_seed(seed)
    pad_id = AutoTokenizer.from_pretrained(folder / "actor").pad_token_id
    idle, case = rss_mb(), read_case(folder, seed)
    actor, ref = (load(OPTForCausalLM, folder / "actor") for _ in range(2))
    critic, reward = (load(OPTForSequenceClassification, folder / "reward") for _ in range(2))
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
            learnt = mask[:, PROMPT_LIMIT:]
            clock.take("generate", responses=len(ids), tokens=learnt.sum().item())

            sequences = ids, mask
            old_logprobs = logprobs_of(actor, *sequences)
            ref_logprobs = logprobs_of(ref, *sequences)
            ends = mask.cumsum(dim=1).argmax(dim=1)
            scores = all_values(reward, *sequences).gather(1, ends[:, None]).squeeze(1)
            old_values = values_of(critic, *sequences)
            clock.take("score")

            rewards = -KL_COEF * (old_logprobs - ref_logprobs) * learnt
            rewards[range(len(rewards)), learnt.sum(dim=1) - 1] += scores.clamp(
                -SCORE_CLIP, SCORE_CLIP
            )
            advantages = advantages_of(rewards, old_values * learnt)
            returns = advantages + old_values

        ratio = torch.exp(logprobs_of(actor, *sequences) - old_logprobs)
        clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
        loss = torch.maximum(-advantages * ratio, -advantages * clipped)
        ((loss * learnt).sum() / learnt.sum()).backward()
        actor_masters.step()

        values = values_of(critic, *sequences)
        clipped = old_values + (values - old_values).clamp(-CLIP_RANGE, CLIP_RANGE)
        loss = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) / 2
        ((loss * learnt).sum() / learnt.sum()).backward()
        critic_masters.step()
        clock.take("train")
        clock.end()
    return {"steps": clock.steps, "idle_mb": idle, "peak_mb": peak_mb()}


def load(kind, folder):
    """A model in bf16."""
    import torch

    return kind.from_pretrained(folder, dtype=torch.bfloat16)


def padded_left(prompts, pad_id):
    """input_ids and attention_mask [B, 256] of prompts."""
    import torch

    spaces = [PROMPT_LIMIT - len(ids) for ids in prompts]
    ids = [[pad_id] * space + ids for space, ids in zip(spaces, prompts, strict=True)]
    mask = [[0] * space + [1] * (PROMPT_LIMIT - space) for space in spaces]
    return torch.tensor(ids), torch.tensor(mask)


def logprobs_of(model, ids, mask):
    """Log-probabilities of the responses' tokens [B, R], from logits of all positions [B, T]."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    logprobs = logits.log_softmax(dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return logprobs[:, PROMPT_LIMIT - 1 :]


def all_values(model, ids, mask):
    """The head's output at each position [B, T]."""
    hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    return model.score(hidden).squeeze(-1)


def values_of(model, ids, mask):
    """The critic's value before each token of the responses [B, R]."""
    return all_values(model, ids, mask)[:, PROMPT_LIMIT - 1 : -1]


def advantages_of(rewards, values):
    """Advantages [B, R] by GAE with gamma 1; rewards and values are 0 behind a response."""
    import torch

    found, following, value = [], 0, 0
    for place in reversed(range(rewards.shape[1])):
        delta = rewards[:, place] + value - values[:, place]
        following, value = delta + GAE_LAMBDA * following, values[:, place]
        found.append(following)
    return torch.stack(found[::-1], dim=1)


WORK = {"prepare": prepare, "ours": ours, "deepspeed_chat": deepspeed_chat}


if __name__ == "__main__":
    main()
