"""How fast SFT, reward model and DPO train on two cores, and in how much memory: make bench-train

Ours beside (a) DeepSpeed-Chat's way and (b) TRL with the settings that serve it best (trl_way.py).
All train the same small OPT (random weights; OPT's vocabulary, and one of 8,192) on the same rows
of ../shared/data/hh_harmless, in the same steps of 8 rows or pairs, in bf16 with fp32 weights
behind. (a) is written out below: a plain loop, which costs what DeepSpeed's does, with torch's
fused AdamW in the place of DeepSpeed's; every sequence padded to 512, logits of all positions, a
score at every position, the reference in every step of DPO.

Tokens are those of prompt and response, without padding; of a pair those of both sequences, for all
ways alike. Memory is the peak above a process that has imported all and loaded nothing. Losses of
the first step are alike but where they differ by definition: (a) compares scores at every position
where responses differ, ours and TRL's at the last one, and each head has random weights of its own;
DPO begins at log 2. Each measurement is a process of its own; they take turns, figures are medians.
"""

import argparse
import contextlib
import importlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace

from data import ROOT, SHARED, peak_mb

STAGES = ("sft", "reward", "dpo")
ROWS = SHARED / "hh_harmless/train.parquet"
# OPT's tokenizer, and one that is trained on the rows.
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
THREADS, SEED, BATCH, LIMIT, RATE, BETAS = 2, 1, 8, 512, 1e-5, (0.9, 0.95)
# Tokens of a pass of ours: a step's rows in one pass, or few.
PASS_TOKENS = 4096


def main():
    """Prepare, measure in turns; a line for each stage and way goes to standard error."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2, help="steps before those timed")
    parser.add_argument("--steps", type=int, default=8, help="steps timed")
    parser.add_argument("--trl-python", default=str(ROOT / ".venv-trl/bin/python"))
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        what, stage, folder = arguments.work
        print(json.dumps(WORK[what](stage, Path(folder))))
        return
    if not ROWS.exists():
        print(f"skipped: {ROWS} is not there", file=sys.stderr)
        return
    warm_up, steps = arguments.warm_up, arguments.steps
    with tempfile.TemporaryDirectory() as folder:
        ours = [sys.executable, __file__, "--work"]
        commands = {
            "ours": [*ours, "ours"],
            "deepspeed_chat": [*ours, "deepspeed_chat"],
            "trl": [arguments.trl_python, str(Path(__file__).with_name("trl_way.py"))],
        }
        cases = list(product(VOCABULARIES, STAGES))
        for words in VOCABULARIES:
            child([*ours, "prepare", str(warm_up + steps), f"{folder}/{words}"], folder)
        found = {case: {way: [] for way in commands} for case in cases}
        for turn in range(arguments.rounds):
            for (words, stage), ways in found.items():
                for way, results in ways.items():
                    results.append(child([*commands[way], stage, f"{folder}/{words}"], folder))
                    print(f"round {turn + 1}: {words} {stage} {way}", file=sys.stderr)
        figures = {words: {stage: {} for stage in STAGES} for words in VOCABULARIES}
        for (words, stage), ways in found.items():
            rows = json.loads(Path(folder, words, f"{stage}.json").read_text())
            for way, results in ways.items():
                figures[words][stage][way] = summary(rows, warm_up, results)
    for words, stage in cases:
        for figure in figures[words][stage].values():
            compare(figures[words][stage]["ours"], figure)
    print(table(figures), file=sys.stderr)
    about = {"cores": os.cpu_count(), "machine": platform.machine(), "threads": THREADS}
    about |= {"rounds": arguments.rounds, "warm_up": warm_up, "steps": steps, "batch": BATCH}
    print(json.dumps({**about, "model": MODEL, "figures": figures}, indent=1))


def child(command, folder):
    """What a process of its own prints as its last line. It is quiet, unless it fails."""
    # Two threads for all; nothing of an earlier run, and nothing from the network.
    settings = {"OMP_NUM_THREADS": str(THREADS), "HF_HOME": f"{folder}/hf", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    if process.returncode:
        sys.exit(process.stderr)
    return json.loads(process.stdout.splitlines()[-1])


def summary(rows, warm_up, results):
    """Medians and ranges over the rounds of a way. rows: those of each step."""
    timed = [row for step in rows[warm_up:] for row in step]
    tokens = sum(
        len(row["prompt"]) + len(row[response])
        for row in timed
        for response in ("chosen", "rejected")
        if response in row
    )
    seconds = [result["ends"][-1] - result["ends"][warm_up - 1] for result in results]
    memory = [result["peak_mb"] - result["idle_mb"] for result in results]
    return {
        "tokens_per_second": spread([tokens / taken for taken in seconds]),
        "rows_per_second": spread([len(timed) / taken for taken in seconds]),
        "peak_mb_above_idle": spread(memory),
        "tokens_timed": tokens,
        "first_loss": round(results[0]["loss"], 5),
    }


def spread(values):
    return {
        name: round(function(values), 2)
        for name, function in {"median": statistics.median, "min": min, "max": max}.items()
    }


def compare(ours, figure, speed="tokens_per_second"):
    """Put into a way's figures how ours compares: ratios of medians. speed: which figure it is."""
    for name, what in (("speed", speed), ("memory", "peak_mb_above_idle")):
        ratio = ours[what]["median"] / figure[what]["median"]
        figure[f"{name}_of_ours_over_this"] = round(ratio, 2)


def table(figures):
    """Figures as lines of text."""
    lines = [
        f"{'words':8}{'stage':7}{'way':15}{'tokens/s':>10}{'min':>9}{'max':>9}{'rows/s':>9}{'MB':>8}"
        f"{'first loss':>12}{'ours, times':>13}"
    ]
    for words, stage in product(VOCABULARIES, STAGES):
        for way, figure in figures[words][stage].items():
            rate, rows = figure["tokens_per_second"], figure["rows_per_second"]["median"]
            lines.append(
                f"{words:8}{stage:7}{way:15}{rate['median']:10,.0f}{rate['min']:9,.0f}{rate['max']:9,.0f}"
                f"{rows:9.2f}{figure['peak_mb_above_idle']['median']:8,.0f}"
                f"{figure['first_loss']:12.4f}{figure['speed_of_ours_over_this']:13.2f}"
            )
    return "\n".join(lines)


def prepare(steps, folder):
    """A model, tokens of each stage, and STAGE.json: the rows of each step, in ours's own order."""
    import numpy as np

    from snakechat.data.records import RecordWriter, read_records
    from snakechat.data.tokens import Ragged
    from snakechat.modeling.batching import global_batches
    from snakechat.modeling.models import make_causal, save_model

    rows = list(read_records(ROWS))
    tokenizer = make_tokenizer(folder.name, rows)
    save_model(make_causal(MODEL, tokenizer, SEED), tokenizer, folder / "model")
    # From all over the file, and some more than the steps take: a few are dropped.
    number = (int(steps) + 2) * BATCH
    rows = rows[:: len(rows) // number][:number]
    (folder / "records").mkdir()
    with RecordWriter(folder / "records/train.parquet") as writer:
        for row in rows:
            writer.write(row)
    for stage in STAGES:
        phase = "reward" if stage == "dpo" else stage
        np.save(folder / f"records/{phase}.train.npy", np.arange(len(rows)))
        np.save(folder / f"records/{phase}.eval.npy", np.arange(1))
        job = make_job(stage, folder, folder / f"tokens.{stage}")
        importlib.import_module(f"tokenize_{stage}").main(job)
        names = ("prompt", "chosen") if stage == "sft" else ("prompt", "chosen", "rejected")
        fields = {name: Ragged(job.result, f"train.{name}") for name in names}
        batches = global_batches(len(fields["prompt"]), BATCH, 1, SEED)
        ids = [
            [{name: field[row].tolist() for name, field in fields.items()} for row in batch]
            for batch in islice(batches, int(steps))
        ]
        (folder / f"{stage}.json").write_text(json.dumps(ids))
    importlib.import_module("compute_reference").main(make_job("dpo", folder, folder / "reference"))


def make_tokenizer(words, rows):
    """OPT's tokenizer, or one of so many words that is trained on the rows."""
    from init_model import train_tokenizer
    from snakechat.data.tokenizers import load_tokenizer

    if words == VOCABULARIES[0]:
        return load_tokenizer(SHARED / "tokenizer_opt")
    texts = (text for row in rows for text in row if text is not None)
    return train_tokenizer(texts, int(words.replace(",", "")))


def make_job(stage, folder, result):
    """A job as a program of ours gets it: a stage's defaults, but for what this benchmark says."""
    import yaml

    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    settings = {**config[stage]["defaults"], "datasets": [["hh", 1]], "template": "dialogue"}
    settings |= {"max_length": LIMIT, "global_batch_size": BATCH, "dtype": "bf16", "seed": SEED}
    settings |= {"learning_rate": RATE, "adam_betas": BETAS, "weight_decay": 0.0}
    del settings["placement"]
    placement = {**config["deployments"]["cpu"], "threads": THREADS}
    placement |= {"micro_batch_tokens": PASS_TOKENS, "save_steps": 1_000_000}
    result.mkdir()
    spec = {"rule": f"train_{stage}", "name": "bench", "path": str(result), "settings": settings}
    return SimpleNamespace(
        settings=SimpleNamespace(**settings),
        placement=placement,
        inputs={
            "records.hh": folder / "records",
            "rows.hh": folder / "records",
            "tokenizer": folder / "model",
            "model": folder / "model",
            "tokens": folder / f"tokens.{stage}",
            "reference": folder / "reference",
        },
        result=result,
        log_folder=result / "logs",
        states=result / "states",
        record={},
        facts={},
        lineage={},
        spec=spec,
    )


class Finished(Exception):
    """All steps are done."""


def ours(stage, folder):
    """A training program's own main, until the steps are done."""
    from transformers import OPTForCausalLM, OPTForSequenceClassification  # noqa: F401

    program = importlib.import_module(f"train_{stage}")
    idle = rss_mb()
    limit = len(json.loads((folder / f"{stage}.json").read_text()))
    with tempfile.TemporaryDirectory(dir=folder) as work:
        job = make_job(stage, folder, Path(work, "result"))
        ends = run_steps(program, job, limit)
        lines = map(json.loads, (job.result / "metrics.jsonl").read_text().splitlines())
        loss = next(line["loss"] for line in lines if line.get("loss") is not None)
    return {"ends": ends, "loss": loss, "idle_mb": idle, "peak_mb": peak_mb()}


def run_steps(program, job, limit):
    """Run a training program's main for so many steps; returns when each of them ended."""
    from snakechat.training.checkpointing import Checkpointer

    ends, steps = [], Checkpointer.steps

    def timed(self, batches):
        for step in steps(self, batches):
            yield step
            ends.append(time.perf_counter())
            if len(ends) == limit:
                raise Finished

    Checkpointer.steps = timed
    with contextlib.suppress(Finished):
        program.main(job)
    return ends


class Clock:
    """Seconds that parts of steps take, one after the other."""

    def __init__(self):
        self.steps, self.step, self.last = [], {}, time.perf_counter()

    def take(self, part, **counts):
        """Note the time since the last part, and what there was in this one, which ends now."""
        now = time.perf_counter()
        self.step |= {part: now - self.last, **counts}
        self.last = now

    def end(self):
        """Begin a new step."""
        self.steps.append(self.step)
        self.step = {}


def rss_mb():
    """Resident memory of this process now."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


def deepspeed_chat(stage, folder):
    """(a) DeepSpeed-Chat's batches and losses in a plain loop."""
    import torch
    from transformers import AutoTokenizer, OPTForCausalLM, OPTModel

    torch.manual_seed(SEED)
    steps = json.loads((folder / f"{stage}.json").read_text())
    pad_id = AutoTokenizer.from_pretrained(folder / "model").pad_token_id
    idle, ends, first = rss_mb(), [], None

    def load(kind):
        return kind.from_pretrained(folder / "model", dtype=torch.bfloat16)

    if stage == "reward":
        backbone, head = load(OPTModel), torch.nn.Linear(256, 1, bias=False, dtype=torch.bfloat16)
        weights = [*backbone.parameters(), *head.parameters()]
        models = (backbone, head)
    else:
        models = (load(OPTForCausalLM),)
        weights = list(models[0].parameters())
        if stage == "dpo":
            models += (load(OPTForCausalLM),)
    masters = Masters(weights)
    for rows in steps:
        loss = LOSSES[stage](*models, *padded(rows, pad_id))
        loss.backward()
        masters.step()
        first = loss.item() if first is None else first
        ends.append(time.perf_counter())
    return {"ends": ends, "loss": first, "idle_mb": idle, "peak_mb": peak_mb()}


class Masters:
    """fp32 copies of 16-bit weights, which torch's fused AdamW updates in their place."""

    def __init__(self, weights):
        import torch

        self.weights = weights
        self.masters = [weight.detach().float() for weight in weights]
        self.optimizer = torch.optim.AdamW(self.masters, RATE, BETAS, weight_decay=0.0, fused=True)

    def step(self):
        """An update by the weights' gradients, clipped to a norm of 1, which are then gone."""
        import torch

        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self.masters, self.weights, strict=True):
                weight.copy_(master)


def padded(rows, pad_id):
    """input_ids and attention_mask [B, 512]: chosen sequences, then rejected ones if there are."""
    import torch

    responses = ["chosen", "rejected"][: len(rows[0]) - 1]
    sequences = [row["prompt"] + row[response] for response in responses for row in rows]
    ids = [sequence + [pad_id] * (LIMIT - len(sequence)) for sequence in sequences]
    mask = [[1] * len(sequence) + [0] * (LIMIT - len(sequence)) for sequence in sequences]
    return torch.tensor(ids), torch.tensor(mask)


def sft_loss(model, ids, mask):
    labels = ids.masked_fill(mask == 0, -100)
    return model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss


def reward_loss(backbone, head, ids, mask):
    """Scores of both responses, compared from where they part to the end of the longer one."""
    import torch

    hidden = backbone(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    losses = []
    for scores, tokens, real in zip(
        *(zip(*part.chunk(2), strict=True) for part in (head(hidden).squeeze(-1), ids, mask)),
        strict=True,
    ):
        start = (tokens[0] != tokens[1]).nonzero()[0]
        end = max(part.sum() for part in real)
        margins = scores[0][start:end] - scores[1][start:end]
        losses.append(-torch.nn.functional.logsigmoid(margins).mean())
    return torch.stack(losses).mean()


def dpo_loss(model, reference, ids, mask, beta=0.1):
    """log-probabilities of what follows the place where responses part, under both models."""
    import torch

    chosen, rejected = ids.chunk(2)
    parted = (chosen != rejected).int().cummax(dim=1).values
    learnt = (mask * torch.cat([parted, parted]))[:, 1:]

    def logprobs(of):
        logits = of(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        of_tokens = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        return (of_tokens * learnt).sum(-1)

    with torch.no_grad():
        expected = logprobs(reference)
    chosen, rejected = (logprobs(model) - expected).chunk(2)
    return -torch.nn.functional.logsigmoid(beta * (chosen - rejected)).mean()


LOSSES = {"sft": sft_loss, "reward": reward_loss, "dpo": dpo_loss}
WORK = {"prepare": prepare, "ours": ours, "deepspeed_chat": deepspeed_chat}


if __name__ == "__main__":
    main()
