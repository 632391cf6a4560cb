"""Compute the perplexity of the base model and of the fine-tuned model on the evaluation split.

response_perplexity is computed over the tokens of responses, perplexity over whole rows, which may
consist of prompts for the most part.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from snakechat.evaluation.comparisons import ratio_interval
from snakechat.evaluation.held_out_rows import sampled_models, write_metrics
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import response_logprobs
from snakechat.workflow.job import Job, run
from snakechat.workflow.processes import rank

# Names of the models in metrics.json and in responses.jsonl, by the job's inputs.
MOMENTS = {"base": "before", "model": "after"}
NAMES = {"base": "base", "model": "sft"}
# Whether prompts count, by prefix of the names of metrics.
PREFIXES = {"": True, "response_": False}

# {moment: {prefix: log-probability of each row [n]}}.
Logprobs = dict[str, dict[str, np.ndarray]]


def main(job: Job[Any]) -> None:
    """Evaluate both models one after the other."""
    examples = Examples.read(job.inputs["tokens"], "eval", "chosen")
    logprobs: Logprobs = {}
    for key, model in sampled_models(job, job.settings.dtype, examples, NAMES):
        logprobs[MOMENTS[key]] = {
            prefix: response_logprobs(model.module, examples, with_prompts=whole)[0]
            for prefix, whole in PREFIXES.items()
        }
    if rank() > 0:
        return
    tokens = {prefix: examples.num_tokens(whole) for prefix, whole in PREFIXES.items()}
    metrics = write_metrics(job, partial(perplexities, logprobs, tokens))
    before, after = (metrics[moment]["response_perplexity"] for moment in MOMENTS.values())
    print(f"perplexity of responses {before:.3f} -> {after:.3f}")


def perplexities(
    logprobs: Logprobs, tokens: Mapping[str, np.ndarray], clusters: np.ndarray, rows: slice
) -> dict[str, Any]:
    """Return the perplexities and numbers of tokens of some rows, with 95 % intervals.

    Args:
        tokens: {prefix: number of target tokens [n] of each row}.
        clusters: Cluster of each row [n].
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
