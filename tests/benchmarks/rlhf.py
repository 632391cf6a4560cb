"""Measure the speed and memory of RLOO and GRPO steps on two cores: make bench-rlhf

Compares train_rlhf with TRL's trainers with their fastest settings (trl_rlhf.py). Both sample from
the same small OPT model (train.py) for the same prompts of ../shared/data/hh_harmless in the same
order, score the responses by the same reward model, and make one update on all of them, in bf16
with fp32 master weights.

The actor of a case ends its responses with a probability that makes the mean length half the limit;
one in five reaches the limit. Lengths are random, so that the implementations work on equal lengths
up to noise: see mean_response_tokens.

The time of a step is the time between the ends of two steps. Memory is the peak above a process
that has imported everything and loaded nothing. Each measurement is a separate process; the
implementations take turns, each round draws new prompts and responses, and results are medians.
"""

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from measuring import (
    MODEL,
    RATE,
    ROOT,
    SEED,
    SETTINGS,
    THREADS,
    VOCABULARIES,
    make_tokenizer,
    measured,
    read_rows,
    rss_mb,
    run,
)

PROMPT_LIMIT, MICRO_BATCH_TOKENS, WARM_UP, STEPS = 256, 8192, 1, 3
# (1 - exp(-x)) / x = 1/2: with an eos probability of x / limit, the mean length is limit / 2.
EOS_RATE = 1.594
KL_COEF = 0.1


class Case(NamedTuple):
    """A row of the table. limit: maximum number of tokens of a response."""

    vocabulary: str
    algorithm: str
    prompts: int
    num_generations: int
    limit: int

    def __str__(self):
        size = f"{self.prompts}x{self.num_generations}"
        return f"{self.vocabulary} {self.algorithm} {size} {self.limit}"


LARGE, SMALL = VOCABULARIES
CASES = (
    Case(SMALL, "rloo", 8, 4, 64),
    Case(SMALL, "grpo", 8, 4, 64),
    Case(LARGE, "grpo", 8, 4, 64),
)


def prepare(vocabulary, folder, rounds):
    """Write a folder for each case of a vocabulary: actor, reward model and tokens.

    ROUND.json contains the case and the prompts of each step, in the order of train_rlhf.
    """
    from gpu.workloads import write_tokens
    from snakechat.data.dialogues import parse_prompt
    from snakechat.data.encoder import Encoder
    from snakechat.modeling.batching import epoch_batches
    from snakechat.modeling.loading import load_scorer
    from snakechat.modeling.models import make_causal
    from snakechat.modeling.saving import save_model

    rows = read_rows()
    tokenizer = make_tokenizer(vocabulary, rows)
    base, reward = (Path(folder, f"{vocabulary} {name}") for name in ("base", "reward"))
    save_model(make_causal(MODEL, tokenizer, SEED), tokenizer, base)
    torch.manual_seed(SEED)
    save_model(load_scorer(base, "fp32", tokenizer, new_head=True), tokenizer, reward)
    # Distinct prompts from the whole file; twice as many as needed, because long ones are skipped.
    texts = list(dict.fromkeys(prompt for prompt, *_ in rows))
    num_texts = 2 * (WARM_UP + STEPS) * max(case.prompts for case in CASES)
    encoded = Encoder(tokenizer, "dialogue").prompts(
        list(map(parse_prompt, texts[:: len(texts) // num_texts]))
    )
    prompts = [ids for ids in encoded if len(ids) <= PROMPT_LIMIT]
    for case in (case for case in CASES if case.vocabulary == vocabulary):
        path = Path(folder, str(case))
        path.mkdir()
        (path / "reward").symlink_to(reward)
        chosen = prompts[: case.prompts * (WARM_UP + STEPS)]
        actor = make_causal(MODEL, tokenizer, SEED)
        make_eos_likely(actor, chosen[:32], tokenizer.eos_token_id, EOS_RATE / case.limit)
        save_model(actor, tokenizer, path / "actor")
        write_tokens(path / "tokens", len(tokenizer), prompt=chosen)
        for turn in range(int(rounds)):
            [batches] = epoch_batches(len(chosen), case.prompts, 1, SEED + turn)
            steps = [[chosen[row] for row in batch] for batch in batches]
            content = {**case._asdict(), "kl_coef": KL_COEF, "steps": steps}
            (path / f"{turn}.json").write_text(json.dumps(content))


def make_eos_likely(model, prompts, eos_id, likelihood):
    """Change a model so that the mean probability of eos after prompts is likelihood."""
    eos = model.get_output_embeddings().weight[eos_id]
    with torch.no_grad():
        # Iterate, because the bias of the last norm changes the other logits slightly, too.
        for _ in range(3):
            logits = torch.cat([model(torch.tensor([ids])).logits[0] for ids in prompts])
            current = logits.softmax(dim=-1)[:, eos_id].mean()
            missing = torch.tensor(likelihood).logit() - current.logit()
            model.model.decoder.final_layer_norm.bias += missing * eos / eos.square().sum()


def ours(folder, case, turn):
    """Run main of train_rlhf for the steps of a case, with the default settings otherwise."""
    from transformers import OPTForSequenceClassification  # noqa: F401

    from gpu.workloads import make_job, train

    importlib.import_module("train_rlhf")
    folder = Path(folder, case)
    case, idle = json.loads((folder / f"{turn}.json").read_text()), rss_mb()
    number = case["prompts"] * case["num_generations"]
    in_loss = {"kl_in": "loss", "kl_estimator": "k3"} if case["algorithm"] == "grpo" else {}
    with tempfile.TemporaryDirectory(dir=folder) as work:
        job = make_job(
            "rlhf",
            {name: folder / name for name in ("actor", "reward", "tokens")},
            Path(work, "result"),
            {"gpus_per_node": 0, "threads": THREADS, "micro_batch_tokens": MICRO_BATCH_TOKENS},
            algorithm=case["algorithm"],
            num_generations=case["num_generations"],
            rollout_batch_size=case["prompts"],
            global_batch_size=number,
            max_prompt_length=PROMPT_LIMIT,
            max_response_length=case["limit"],
            actor_learning_rate=RATE,
            critic_learning_rate=RATE,
            kl_coef=KL_COEF,
            lora_rank=0,
            seed=SEED + int(turn),
            **in_loss,
            **SETTINGS,
        )
        ends = train(job, WARM_UP + STEPS)
        times = map(json.loads, (job.log_folder / "times.jsonl").read_text().splitlines())
        tokens = [step["tokens"] for step in times]
    mean = sum(tokens) / len(tokens) / number
    return measured(ends, WARM_UP, STEPS * number, idle, mean_response_tokens=mean)


if __name__ == "__main__":
    trl = [str(ROOT / ".venv-trl/bin/python"), str(Path(__file__).with_name("trl_rlhf.py"))]
    commands = {"ours": [sys.executable, __file__, "ours"], "trl": trl}
    work = {"prepare": prepare, "ours": ours}
    run(__doc__, work, commands, list(map(str, CASES)), "responses", rounds=3)
