"""Compute the perplexity of the base model and of the fine-tuned model on the evaluation split.

response_perplexity is computed over the tokens of responses, perplexity over whole rows, which may
consist of prompts for the most part.
"""

import math
from typing import Any

import numpy as np
import torch

from snakechat.evaluation.comparisons import ratio_interval
from snakechat.evaluation.held_out_rows import sampled_models, write_metrics
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import response_logprobs
from snakechat.workflow.job import Job, run
from snakechat.workflow.processes import rank

# Names of the models in metrics.json.
MOMENTS = ("before", "after")
# Their names in responses.jsonl, by the job's inputs, in the same order.
NAMES = {"base": "base", "model": "sft"}
# Whether prompts count, by prefix of the names of metrics.
PREFIXES = {"": True, "response_": False}


def main(job: Job[Any]) -> None:
    """Evaluate both models one after the other."""
    examples = Examples.read(job.inputs["tokens"], "eval", "chosen")
    logprobs = [
        [response_logprobs(model.module, examples, counted)[0] for counted in PREFIXES.values()]
        for _, model in sampled_models(job, job.settings.dtype, examples, NAMES)
    ]
    if rank() > 0:
        return
    tokens = [examples.num_tokens(counted) for counted in PREFIXES.values()]
    metrics = write_metrics(job, perplexities, -np.array(logprobs), np.array(tokens))
    before, after = (metrics[moment]["response_perplexity"] for moment in MOMENTS)
    print(f"perplexity of responses {before:.3f} -> {after:.3f}")


def perplexities(nats: np.ndarray, tokens: np.ndarray, clusters: torch.Tensor) -> dict[str, Any]:
    """Return the perplexities and numbers of tokens of rows, with 95 % intervals.

    Args:
        nats: -log p [2, 2, n] of each row, of MOMENTS and of PREFIXES.
        tokens: Number of target tokens [2, n] of each row, of PREFIXES.
        clusters: Cluster of each row [n].
    """
    metrics: dict[str, Any] = {"rows": len(clusters), "intervals_95": {}}
    for moment, of_moment in zip(MOMENTS, nats, strict=True):
        metrics[moment], intervals = {}, {}
        for prefix, values, counts in zip(PREFIXES, of_moment, tokens, strict=True):
            metrics[moment][f"{prefix}perplexity"] = math.exp(values.sum() / counts.sum())
            metrics[moment][f"{prefix}tokens"] = int(counts.sum())
            if interval := ratio_interval(values, counts, clusters.numpy()):
                intervals[f"{prefix}perplexity"] = [math.exp(bound) for bound in interval]
        metrics["intervals_95"][moment] = intervals
    return metrics


if __name__ == "__main__":
    run(main)
