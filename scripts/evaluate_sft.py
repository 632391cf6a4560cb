"""Compute the perplexity of the base model and of the fine-tuned model on the evaluation split.

response_perplexity is computed over the tokens of responses, perplexity over whole rows, which may
consist of prompts for the most part.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from snakechat.data.tokenizers import load_tokenizer
from snakechat.evaluation.held_out_rows import write_metrics
from snakechat.evaluation.intervals import ratio_interval
from snakechat.evaluation.sample_responses import held_out_responses, write_responses
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, response_logprobs
from snakechat.training.placed_models import load_frozen, start_evaluation
from snakechat.workflow.job import Job, run
from snakechat.workflow.processes import rank

MOMENTS = {"before": "base", "after": "model"}
# Names of the models in responses.jsonl.
NAMES = {"base": "base", "model": "sft"}
# Names of the metrics: whether prompts count.
PREFIXES = {"": True, "response_": False}

# {moment: {prefix: log-probability of each row [n]}}.
Logprobs = dict[str, dict[str, np.ndarray]]


def main(job: Job[Any]) -> None:
    """Evaluate both models one after the other."""
    placement, dtype = job.placement, job.settings.dtype
    start_evaluation(placement, dtype)
    examples = Examples.read(job.inputs["tokens"], "eval", "chosen")
    tokenizer = load_tokenizer(job.inputs["model"])
    logprobs: Logprobs = {}
    responses = {}
    for moment, key in MOMENTS.items():
        folder = job.inputs[key]
        with load_frozen(Policy, folder, dtype, tokenizer, placement, examples, True) as model:
            logprobs[moment] = {
                prefix: response_logprobs(model.module, examples, with_prompts=whole)[0]
                for prefix, whole in PREFIXES.items()
            }
            responses[NAMES[key]] = held_out_responses(model, tokenizer, folder, examples)
    if rank() > 0:
        return
    write_responses(job.result / "responses.jsonl", tokenizer, examples, responses)
    tokens = {prefix: examples.num_tokens(whole) for prefix, whole in PREFIXES.items()}
    metrics = write_metrics(job, partial(perplexities, logprobs, tokens))
    before, after = (metrics[moment]["response_perplexity"] for moment in MOMENTS)
    print(f"perplexity of responses {before:.3f} -> {after:.3f}")


def perplexities(
    logprobs: Logprobs, tokens: Mapping[str, np.ndarray], clusters: np.ndarray, rows: slice
) -> dict[str, Any]:
    """Return the perplexities and numbers of tokens of some rows, with 95 % intervals.

    Args:
        tokens: {prefix: number of target tokens [n] of each row}.
        clusters: Cluster of each row [n]: rows with equal prompts share one.
    """
    metrics: dict[str, Any] = {"rows": len(tokens[""][rows]), "intervals_95": {}}
    for moment, of_prefix in logprobs.items():
        metrics[moment], intervals = {}, {}
        for prefix, values in of_prefix.items():
            nats, counts = -values[rows], tokens[prefix][rows]
            metrics[moment][f"{prefix}perplexity"] = math.exp(nats.sum() / counts.sum())
            metrics[moment][f"{prefix}tokens"] = int(counts.sum())
            if interval := ratio_interval(nats, counts, clusters[rows]):
                intervals[f"{prefix}perplexity"] = [math.exp(bound) for bound in interval]
        metrics["intervals_95"][moment] = intervals
    return metrics


if __name__ == "__main__":
    run(main)
