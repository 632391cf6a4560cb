"""Perplexity on held-out rows, before and after fine-tuning."""

import math

import torch

from rlhf.batches import micro_batches, pad, span_mask
from rlhf.job import run
from rlhf.metrics import write_json
from rlhf.models import choose_device, load_causal
from rlhf.passes import Policy
from rlhf.tokens import Ragged, load_tokenizer


def main(job):
    """Perplexities of the base model and of the fine-tuned one, weighted by tokens."""
    device = choose_device(job.placement)
    prompts = Ragged(job.inputs["tokens"], "eval.prompt")
    responses = Ragged(job.inputs["tokens"], "eval.chosen")
    tokenizer = load_tokenizer(job.inputs["model"])
    figures = {"rows": len(prompts)}
    for name, folder in (("before", job.inputs["base"]), ("after", job.inputs["model"])):
        policy = Policy(load_causal(folder, job.settings.dtype, tokenizer)).to(device).eval()
        figures[name] = perplexities(
            policy, prompts, responses, tokenizer.pad_token_id, job.placement["micro_batch_tokens"]
        )
    write_json(job.result / "metrics.json", figures)
    before, after = (figures[name]["perplexity"] for name in ("before", "after"))
    print(f"perplexity {before:.3f} -> {after:.3f}")


@torch.no_grad()
def perplexities(policy, prompts, responses, pad_id, max_tokens):
    """Perplexity over all tokens but each row's first, and over the response tokens alone."""
    device = next(policy.parameters()).device
    lengths = prompts.lengths + responses.lengths
    loss, response_loss = 0.0, 0.0
    for rows in micro_batches(range(len(prompts)), lengths, max_tokens):
        sequences = [[*prompts[row], *responses[row]] for row in rows]
        input_ids, attention_mask = pad(sequences, pad_id, device)
        width, ends = input_ids.shape[1], lengths[rows]
        learnt = span_mask([1] * len(rows), ends, width, device)
        answers = span_mask(prompts.lengths[rows], ends, width, device)
        logprobs = policy(input_ids, attention_mask, learnt)
        loss -= logprobs.double().sum().item()
        response_loss -= logprobs.double()[answers[learnt]].sum().item()
    tokens, response_tokens = int((lengths - 1).sum()), int(responses.lengths.sum())
    return {
        "perplexity": math.exp(loss / tokens),
        "tokens": tokens,
        "response_perplexity": math.exp(response_loss / response_tokens),
        "response_tokens": response_tokens,
    }


if __name__ == "__main__":
    run(main)
