"""Throughput and memory of SFT, reward model and DPO training on two cores (make bench-train).

Compares Snakechat with the method of DeepSpeed-Chat. Both train the same small OPT (random weights;
the vocabulary of OPT, and one of 8,192) on the same rows of ../shared/data/hh_harmless, in the same
steps of 8 rows or pairs, in bf16 with fp32 master weights. The method of DeepSpeed-Chat is a plain
loop below, with torch's fused AdamW instead of DeepSpeed's: every sequence is padded to 512, logits
and scores are computed at all positions, and the reference model runs in every step of DPO.

Tokens are those of prompt and response without padding, of both sequences of a pair. Memory is the
peak above that of a process after its imports. The losses of the first step agree except where they
differ by definition: DeepSpeed-Chat compares scores at every position where the responses differ,
Snakechat at the last one, and each score head has its own random weights; DPO starts at log 2. Each
measurement is a separate process; the methods alternate, and the results are medians.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from snakechat.workflow.placement import placement_of  # noqa: E402
from snakechat.workflow.run_options import RunOptions  # noqa: E402

STAGES = ("sft", "reward", "dpo")
SHARED = ROOT.parent / "shared/data"
ROWS = SHARED / "hh_harmless/train.parquet"
# The tokenizer of OPT, and one that is trained on the rows.
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
# micro_batch_tokens of Snakechat: a step has one or a few micro-batches.
MICRO_BATCH_TOKENS = 4096


def main():
    """Prepare and measure; print progress to standard error and results to standard output."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2, help="steps before those timed")
    parser.add_argument("--steps", type=int, default=8, help="steps timed")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        what, stage, folder = arguments.work
        print(json.dumps(WORK[what](stage, Path(folder))))
        return
    if not ROWS.exists():
        print(f"skipped: {ROWS} does not exist", file=sys.stderr)
        return
    warm_up, steps = arguments.warm_up, arguments.steps
    with tempfile.TemporaryDirectory() as folder:
        ours = [sys.executable, __file__, "--work"]
        commands = {
            "ours": [*ours, "ours"],
            "deepspeed_chat": [*ours, "deepspeed_chat"],
        }
        cases = list(product(VOCABULARIES, STAGES))
        for vocabulary in VOCABULARIES:
            child([*ours, "prepare", str(warm_up + steps), f"{folder}/{vocabulary}"], folder)
        measurements = {case: {method: [] for method in commands} for case in cases}
        for turn in range(arguments.rounds):
            for (vocabulary, stage), methods in measurements.items():
                for method, results in methods.items():
                    results.append(
                        child([*commands[method], stage, f"{folder}/{vocabulary}"], folder)
                    )
                    print(f"round {turn + 1}: {vocabulary} {stage} {method}", file=sys.stderr)
        metrics = {vocabulary: {stage: {} for stage in STAGES} for vocabulary in VOCABULARIES}
        for (vocabulary, stage), methods in measurements.items():
            rows = json.loads(Path(folder, vocabulary, f"{stage}.json").read_text())
            for method, results in methods.items():
                metrics[vocabulary][stage][method] = summary(rows, warm_up, results)
    for vocabulary, stage in cases:
        for entry in metrics[vocabulary][stage].values():
            compare(metrics[vocabulary][stage]["ours"], entry)
    about = {"cores": os.cpu_count(), "machine": platform.machine(), "threads": THREADS}
    about |= {"rounds": arguments.rounds, "warm_up": warm_up, "steps": steps, "batch": BATCH}
    print(json.dumps({**about, "model": MODEL, "figures": metrics}, indent=1))


def child(command, folder, timeout=None):
    """Run a command in a new process and return its last line of output, parsed as JSON."""
    # The same number of threads for all; no cache of an earlier run and no network.
    settings = {"OMP_NUM_THREADS": str(THREADS), "HF_HOME": f"{folder}/hf", "HF_HUB_OFFLINE": "1"}
    environment = os.environ | settings
    process = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=timeout
    )
    if process.returncode:
        sys.exit(process.stderr)
    return json.loads(process.stdout.splitlines()[-1])


def summary(rows, warm_up, results):
    """Return medians and ranges over the rounds of a method. rows: those of each step."""
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


def compare(ours, entry, speed="tokens_per_second"):
    """Add the ratios of Snakechat's medians to those of a method. speed: name of the metric."""
    for name, what in (("speed", speed), ("memory", "peak_mb_above_idle")):
        ratio = ours[what]["median"] / entry[what]["median"]
        entry[f"{name}_of_ours_over_this"] = round(ratio, 2)


def prepare(steps, folder):
    """Write a model, tokens of each stage, and STAGE.json with the rows of each step."""
    import numpy as np

    from snakechat.data.dialogues import parse_prompt
    from snakechat.data.ragged_arrays import Ragged
    from snakechat.data.records import RecordWriter
    from snakechat.modeling.batching import global_batches
    from snakechat.modeling.models import make_causal
    from snakechat.modeling.saving import save_model

    rows = read_rows()
    tokenizer = make_tokenizer(folder.name, rows)
    save_model(make_causal(MODEL, tokenizer, SEED), tokenizer, folder / "model")
    # Spread over the file, and more than the steps need, because a few rows are dropped.
    number = (int(steps) + 2) * BATCH
    rows = rows[:: len(rows) // number][:number]
    (folder / "records").mkdir()
    with RecordWriter(folder / "records/train.parquet") as writer:
        for prompt, chosen, rejected in rows:
            writer.write((parse_prompt(prompt), chosen, rejected))
    for stage in STAGES:
        phase = "reward" if stage == "dpo" else stage
        np.save(folder / f"records/{phase}.train.npy", np.arange(len(rows)))
        np.save(folder / f"records/{phase}.eval.npy", np.arange(1))
        job = make_job(stage, folder, folder / f"tokens.{stage}")
        job.spec["rule"] = f"tokenize_{stage}"
        importlib.import_module("tokenize_phase").main(job)
        names = ("prompt", "chosen") if stage == "sft" else ("prompt", "chosen", "rejected")
        fields = {name: Ragged(job.result, f"train.{name}") for name in names}
        batches = global_batches(len(fields["prompt"]), BATCH, 1, SEED)
        ids = [
            [{name: field[row].tolist() for name, field in fields.items()} for row in batch]
            for batch in islice(batches, int(steps))
        ]
        (folder / f"{stage}.json").write_text(json.dumps(ids))
    importlib.import_module("compute_reference").main(make_job("dpo", folder, folder / "reference"))


def read_rows():
    """Return the texts (prompt, chosen, rejected) of each row of the benchmarks."""
    import pyarrow.parquet as pq

    table = pq.ParquetFile(ROWS).read(["prompt", "chosen", "rejected"])
    return [tuple(row.values()) for row in table.to_pylist()]


def make_tokenizer(vocabulary, rows):
    """Return the tokenizer of OPT, or one with a vocabulary of this size trained on the rows."""
    from init_model import train_tokenizer
    from snakechat.data.tokenizers import load_tokenizer

    if vocabulary == VOCABULARIES[0]:
        return load_tokenizer(SHARED / "tokenizer_opt")
    texts = (text for row in rows for text in row if text is not None)
    return train_tokenizer(texts, int(vocabulary.replace(",", "")))


def make_job(stage, folder, result):
    """Return a job with the defaults of a stage and the settings of this benchmark."""
    import yaml

    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    settings = {**config[stage]["defaults"], "datasets": [["hh", 1]], "template": "dialogue"}
    settings |= {"max_length": LIMIT, "global_batch_size": BATCH}
    settings |= {"dtype": "bf16", "seed": SEED}
    settings |= {"learning_rate": RATE, "adam_betas": BETAS, "weight_decay": 0.0}
    settings |= {"unpaired": False, "mismatched_max_length": None, "batches": None}
    del settings["placement"]
    placement = placement_of({"threads": THREADS, "micro_batch_tokens": MICRO_BATCH_TOKENS})
    result.mkdir()
    spec = {"rule": f"train_{stage}", "name": "bench", "path": str(result), "settings": settings}
    return SimpleNamespace(
        settings=SimpleNamespace(**settings),
        placement=placement,
        options=RunOptions(save_steps=1_000_000),
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
    """Ends a program after the last measured step."""


def ours(stage, folder):
    """Run the main function of a training program for the measured steps."""
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
    """Run the main function of a training program; return the time at which each step ended."""
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
    """Measures consecutive sections of steps."""

    def __init__(self):
        self.steps, self.step, self.last = [], {}, time.perf_counter()

    def take(self, section, **counts):
        """Record the seconds of the section that ends now, and counts of it."""
        ended = time.perf_counter()
        self.step |= {section: ended - self.last, **counts}
        self.last = ended

    def end(self):
        """End a step."""
        self.steps.append(self.step)
        self.step = {}


def rss_mb(kind="VmRSS"):
    """Return the resident memory of this process in MB."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{kind}:\s+(\d+)", status)[1]) / 1024


def peak_mb():
    """Return the peak memory of this process. getrusage would include its parent."""
    return rss_mb("VmHWM")


def deepspeed_chat(stage, folder):
    """Train with the batches and losses of DeepSpeed-Chat in a plain loop."""
    import torch
    from transformers import (  # noqa: F401 imported before idle memory
        AutoModel,
        AutoModelForCausalLM,
        AutoTokenizer,
        OPTForCausalLM,
        OPTModel,
    )

    torch.manual_seed(SEED)
    steps = json.loads((folder / f"{stage}.json").read_text())
    pad_id = AutoTokenizer.from_pretrained(folder / "model").pad_token_id
    idle, ends, first = rss_mb(), [], None

    def load(kind):
        return kind.from_pretrained(folder / "model", dtype=torch.bfloat16)

    if stage == "reward":
        backbone = load(AutoModel)
        size = backbone.config.hidden_size
        head = torch.nn.Linear(size, 1, bias=False, dtype=torch.bfloat16)
        weights = [*backbone.parameters(), *head.parameters()]
        models = (backbone, head)
    else:
        models = (load(AutoModelForCausalLM),)
        weights = list(models[0].parameters())
        if stage == "dpo":
            models += (load(AutoModelForCausalLM),)
    masters = Masters(weights)
    for rows in steps:
        loss = LOSSES[stage](*models, *padded(rows, pad_id))
        loss.backward()
        masters.step()
        first = loss.item() if first is None else first
        ends.append(time.perf_counter())
    return {"ends": ends, "loss": first, "idle_mb": idle, "peak_mb": peak_mb()}


class Masters:
    """fp32 master copies of 16-bit weights, updated by torch's fused AdamW."""

    def __init__(self, weights):
        import torch

        self.weights = weights
        self.masters = [weight.detach().float() for weight in weights]
        self.optimizer = torch.optim.AdamW(self.masters, RATE, BETAS, weight_decay=0.0, fused=True)

    def step(self):
        """Update the weights with their gradients, clipped to a norm of 1; free the gradients."""
        import torch

        for master, weight in zip(self.masters, self.weights, strict=True):
            # A weight that no loss reads has no gradient.
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self.masters, self.weights, strict=True):
                weight.copy_(master)


def padded(rows, pad_id):
    """Return input_ids and attention_mask [B, LIMIT]: chosen sequences, then any rejected ones."""
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
    """Compare the scores at all positions from the first difference to the longer end."""
    import torch

    hidden = backbone(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    losses = []
    for scores, tokens, real in zip(
        *(zip(*table.chunk(2), strict=True) for table in (head(hidden).squeeze(-1), ids, mask)),
        strict=True,
    ):
        start = (tokens[0] != tokens[1]).nonzero()[0]
        end = max(sequence.sum() for sequence in real)
        margins = scores[0][start:end] - scores[1][start:end]
        losses.append(-torch.nn.functional.logsigmoid(margins).mean())
    return torch.stack(losses).mean()


def dpo_loss(model, reference, ids, mask, beta=0.1):
    """Compare log-probabilities of the tokens from the first difference on, under both models."""
    import torch

    chosen, rejected = ids.chunk(2)
    differs = (chosen != rejected).int().cummax(dim=1).values
    targets = (mask * torch.cat([differs, differs]))[:, 1:]

    def logprobs(of):
        logits = of(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        token_logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        return (token_logprobs * targets).sum(-1)

    with torch.no_grad():
        ref_logprobs = logprobs(reference)
    chosen, rejected = (logprobs(model) - ref_logprobs).chunk(2)
    return -torch.nn.functional.logsigmoid(beta * (chosen - rejected)).mean()


LOSSES = {"sft": sft_loss, "reward": reward_loss, "dpo": dpo_loss}
WORK = {"prepare": prepare, "ours": ours, "deepspeed_chat": deepspeed_chat}


if __name__ == "__main__":
    main()
