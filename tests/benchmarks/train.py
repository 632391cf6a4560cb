"""Throughput and memory of SFT, reward model and DPO training on two cores (make bench-train).

Compares Snakechat with the method of DeepSpeed-Chat. Both train the same small OPT (random weights;
the vocabulary of OPT, and one of 8,192) on the same rows of ../shared/data/hh_harmless, in the same
steps of 8 rows or pairs, in bf16 with fp32 master weights. The method of DeepSpeed-Chat is a plain
loop below, with torch's fused AdamW instead of DeepSpeed's: every sequence is padded to 512, logits
and scores are computed at all positions, and the reference model runs in every step of DPO.

Tokens of prompt and response count, without padding, in both sequences of a pair. Memory is the
peak above the memory of a process after its imports. The losses of the first step agree except
where they differ by definition: DeepSpeed-Chat compares scores at every position where the
responses differ, Snakechat at the last one, and each score head has its own random weights. DPO
starts at log 2. Each measurement is a separate process; the methods alternate, and the results are
medians.
"""

import importlib
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from measuring import (
    BETAS,
    MODEL,
    RATE,
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
from torch.nn.functional import logsigmoid

CASES = [f"{name} {stage}" for name in VOCABULARIES for stage in ("sft", "reward", "dpo")]
BATCH, LIMIT, WARM_UP, STEPS = 8, 512, 2, 8
# micro_batch_tokens of Snakechat: a step has one or a few micro-batches.
MICRO_BATCH_TOKENS = 4096


def prepare(vocabulary, folder, rounds):
    """Write a model, tokens, steps.json with the rows of each step, and DPO's reference."""
    from gpu.workloads import write_reference, write_tokens
    from snakechat.data.dialogues import parse_prompt
    from snakechat.data.encoder import Encoder, accepted
    from snakechat.modeling.batching import epoch_batches
    from snakechat.modeling.models import make_causal
    from snakechat.modeling.saving import save_model

    folder, rows = Path(folder, vocabulary), read_rows()
    tokenizer = make_tokenizer(vocabulary, rows)
    save_model(make_causal(MODEL, tokenizer, SEED), tokenizer, folder / "model")
    encoder = Encoder(tokenizer, "dialogue")
    pairs = [(parse_prompt(prompt), responses) for prompt, *responses in rows]
    encoded = accepted(encoder.conversations(pairs))
    fitting = [
        {"prompt": prompt, "chosen": responses[0], "rejected": responses[1]}
        for prompt, responses in encoded
        if len(prompt) + max(map(len, responses)) <= LIMIT
    ]
    # Spread over the file.
    number = (WARM_UP + STEPS) * BATCH
    rows = fitting[:: len(fitting) // number][:number]
    fields = {name: [row[name] for row in rows] for name in rows[0]}
    write_tokens(folder / "tokens", len(tokenizer), **fields)
    [batches] = epoch_batches(len(rows), BATCH, 1, SEED)
    steps = [[rows[row] for row in batch] for batch in batches]
    (folder / "steps.json").write_text(json.dumps(steps))
    write_reference(training_job("dpo", folder, folder / "result"))


def read_case(folder, case):
    """Return the folder and the stage of a case; the sequences of each step, chosen ones first; and
    the number of tokens in the measured steps.
    """
    vocabulary, stage = case.split()
    folder = Path(folder, vocabulary)
    responses = ["chosen"] if stage == "sft" else ["chosen", "rejected"]
    steps = [
        [row["prompt"] + row[response] for response in responses for row in rows]
        for rows in json.loads((folder / "steps.json").read_text())
    ]
    return folder, stage, steps, sum(len(ids) for step in steps[WARM_UP:] for ids in step)


def training_job(stage, folder, result):
    """Return a job with the defaults of a stage and the settings of this benchmark."""
    from gpu.workloads import make_job

    return make_job(
        stage,
        {name: folder / name for name in ("model", "tokens", "reference")},
        result,
        {"gpus_per_node": 0, "threads": THREADS, "micro_batch_tokens": MICRO_BATCH_TOKENS},
        max_length=LIMIT,
        global_batch_size=BATCH,
        learning_rate=RATE,
        **SETTINGS,
    )


def ours(folder, case, turn):
    """Run the main function of a training program for the measured steps."""
    from transformers import OPTForSequenceClassification  # noqa: F401

    from gpu.workloads import metrics, train

    folder, stage, _, tokens = read_case(folder, case)
    importlib.import_module(f"train_{stage}")
    idle = rss_mb()
    with tempfile.TemporaryDirectory(dir=folder) as work:
        job = training_job(stage, folder, Path(work, "result"))
        ends = train(job, WARM_UP + STEPS)
        loss = next(step["loss"] for step in metrics(job) if step.get("loss") is not None)
    return measured(ends, WARM_UP, tokens, idle, first_loss=loss)


def deepspeed_chat(folder, case, turn):
    """Train with the batches and losses of DeepSpeed-Chat in a plain loop."""
    from transformers import AutoTokenizer, OPTForCausalLM, OPTModel

    torch.manual_seed(SEED)
    folder, stage, steps, tokens = read_case(folder, case)
    pad_id = AutoTokenizer.from_pretrained(folder / "model").pad_token_id
    idle, ends, losses = rss_mb(), [], []
    # A backbone and its score head, or a model, for DPO with its reference.
    kinds = {"sft": [OPTForCausalLM], "reward": [OPTModel], "dpo": [OPTForCausalLM] * 2}[stage]
    models = [kind.from_pretrained(folder / "model", dtype=torch.bfloat16) for kind in kinds]
    weights = [*models[0].parameters()]
    if stage == "reward":
        size = models[0].config.hidden_size
        models.append(torch.nn.Linear(size, 1, bias=False, dtype=torch.bfloat16))
        weights += models[1].parameters()
    masters = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(masters, RATE, BETAS, weight_decay=0.0, fused=True)
    for sequences in steps:
        ids = torch.tensor([each + [pad_id] * (LIMIT - len(each)) for each in sequences])
        mask = torch.tensor([[1] * len(each) + [0] * (LIMIT - len(each)) for each in sequences])
        loss = LOSSES[stage](*models, ids, mask)
        loss.backward()
        for master, weight in zip(masters, weights, strict=True):
            # A weight that no loss reads has no gradient.
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)
        losses.append(loss.item())
        ends.append(time.perf_counter())
    return measured(ends, WARM_UP, tokens, idle, first_loss=losses[0])


def sft_loss(model, ids, mask):
    labels = ids.masked_fill(mask == 0, -100)
    return model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss


def reward_loss(backbone, head, ids, mask):
    """Compare the scores at all positions from the first difference to the longer end."""
    hidden = backbone(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    losses, scores, half = [], head(hidden).squeeze(-1), len(ids) // 2
    for chosen, rejected in zip(range(half), range(half, 2 * half), strict=True):
        start = (ids[chosen] != ids[rejected]).nonzero()[0]
        end = max(mask[chosen].sum(), mask[rejected].sum())
        margins = scores[chosen][start:end] - scores[rejected][start:end]
        losses.append(-logsigmoid(margins).mean())
    return torch.stack(losses).mean()


def dpo_loss(model, reference, ids, mask, beta=0.1):
    """Compare log-probabilities of the tokens from the first difference on, under both models."""
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
    return -logsigmoid(beta * (chosen - rejected)).mean()


LOSSES = {"sft": sft_loss, "reward": reward_loss, "dpo": dpo_loss}


if __name__ == "__main__":
    methods = {"ours": ours, "deepspeed_chat": deepspeed_chat}
    commands = {name: [sys.executable, __file__, name] for name in methods}
    run(__doc__, {"prepare": prepare, **methods}, commands, CASES, "tokens", rounds=5)
