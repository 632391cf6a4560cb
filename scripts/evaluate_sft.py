"""Compute the perplexity of the base model and of the fine-tuned model on the evaluation split."""

import math
from typing import Any

from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, response_logprobs
from snakechat.training.evaluated_models import loaded_policy, start_evaluation
from snakechat.training.metrics import write_json
from snakechat.workflow.distributed import rank
from snakechat.workflow.job import Job, run


def main(job: Job[Any]) -> None:
    """Evaluate both models one after the other."""
    placement, dtype = job.placement, job.settings.dtype
    start_evaluation(placement, dtype)
    examples = Examples.read(job.inputs["tokens"], "eval", "chosen")
    tokenizer = load_tokenizer(job.inputs["model"])
    metrics: dict[str, Any] = {"rows": len(examples)}
    for name, folder in (("before", job.inputs["base"]), ("after", job.inputs["model"])):
        with loaded_policy(folder, dtype, tokenizer, placement, examples) as model:
            metrics[name] = perplexities(model.module, examples, placement["micro_batch_tokens"])
    if rank() == 0:
        write_json(job.result / "metrics.json", metrics)
        before, after = (metrics[name]["perplexity"] for name in ("before", "after"))
        print(f"perplexity {before:.3f} -> {after:.3f}")


def perplexities(policy: Policy, examples: Examples, max_tokens: int) -> dict[str, float]:
    """Return perplexity and number of tokens: of sequences and, as response_*, of responses."""
    metrics: dict[str, float] = {}
    for prefix, with_prompts in (("", True), ("response_", False)):
        logprobs = response_logprobs(policy, examples, max_tokens, with_prompts=with_prompts)
        num_tokens = int(examples.num_tokens(with_prompts).sum())
        metrics[f"{prefix}perplexity"] = math.exp(-logprobs.sum() / num_tokens)
        metrics[f"{prefix}tokens"] = num_tokens
    return metrics


if __name__ == "__main__":
    run(main)
