"""Compute the perplexity of the base model and of the fine-tuned model on the evaluation split.

response_perplexity is computed over the tokens of responses, perplexity over whole rows, which may
consist of prompts for the most part.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from snakechat.data.tokenizers import load_tokenizer
from snakechat.evaluation.intervals import clusters_of, ratio_interval
from snakechat.evaluation.sample_responses import held_out_responses, write_responses
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, response_logprobs
from snakechat.training.evaluated_models import load_frozen, start_evaluation
from snakechat.training.metric_logs import write_json
from snakechat.workflow.distributed import rank
from snakechat.workflow.job import Job, run

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
            logprobs[moment] = row_logprobs(model.module, examples)
            responses[NAMES[key]] = held_out_responses(model, tokenizer, folder, examples)
    if rank() > 0:
        return
    write_responses(job.result / "responses.jsonl", tokenizer, examples, responses)
    tokens = {prefix: examples.num_tokens(whole) for prefix, whole in PREFIXES.items()}
    stats = json.loads((job.inputs["tokens"] / "stats.json").read_text())
    rows_of = {name: stats["eval"]["kept_of"][name] for name in job.settings.datasets}
    clusters = clusters_of(tuple(examples.prompts[row]) for row in range(len(examples)))
    metrics = metrics_by_dataset(logprobs, tokens, clusters, rows_of)
    write_json(job.result / "metrics.json", metrics)
    before, after = (metrics[moment]["response_perplexity"] for moment in MOMENTS)
    print(f"perplexity of responses {before:.3f} -> {after:.3f}")


def row_logprobs(policy: Policy, examples: Examples) -> dict[str, np.ndarray]:
    """Return the log-probability [n] of each row: of its sequence, and of its response."""
    return {
        prefix: response_logprobs(policy, examples, with_prompts=whole)[0]
        for prefix, whole in PREFIXES.items()
    }


def metrics_by_dataset(
    logprobs: Logprobs,
    tokens: Mapping[str, np.ndarray],
    clusters: np.ndarray,
    rows_of: Mapping[str, int],
) -> dict[str, Any]:
    """Return the metrics of all rows; of each dataset under by_dataset, if there are several.

    Args:
        tokens: {prefix: number of target tokens [n] of each row}.
        clusters: Cluster of each row [n]: rows with equal prompts share one.
        rows_of: {dataset: number of rows}, in the order of the rows.
    """
    metrics = perplexities(logprobs, tokens, clusters, slice(None))
    rows_of = {name: number for name, number in rows_of.items() if number}
    if len(rows_of) > 1:
        ends = np.cumsum(list(rows_of.values())).tolist()
        metrics["by_dataset"] = {
            name: perplexities(logprobs, tokens, clusters, slice(end - rows_of[name], end))
            for name, end in zip(rows_of, ends, strict=True)
        }
    return metrics


def perplexities(
    logprobs: Logprobs, tokens: Mapping[str, np.ndarray], clusters: np.ndarray, rows: slice
) -> dict[str, Any]:
    """Return the perplexities and numbers of tokens of some rows, with 95 % intervals."""
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
