"""Perplexity on held-out rows, before and after fine-tuning."""

import math

from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, response_logprobs
from snakechat.modeling.models import choose_device, load_causal
from snakechat.training.metrics import write_json
from snakechat.workflow.job import run


def main(job):
    """Perplexities of the base model and of the fine-tuned one, weighted by tokens."""
    device, max_tokens = choose_device(job.placement), job.placement["micro_batch_tokens"]
    held_out = Examples.read(job.inputs["tokens"], "eval", "chosen")
    tokenizer = load_tokenizer(job.inputs["model"])
    figures = {"rows": len(held_out)}
    for name, folder in (("before", job.inputs["base"]), ("after", job.inputs["model"])):
        policy = Policy(load_causal(folder, job.settings.dtype, tokenizer)).to(device)
        figures[name] = {}
        for what, with_prompts in (("", True), ("response_", False)):
            logprobs = response_logprobs(policy, held_out, max_tokens, with_prompts=with_prompts)
            tokens = int(held_out.num_tokens(with_prompts).sum())
            figures[name][f"{what}perplexity"] = math.exp(-logprobs.sum() / tokens)
            figures[name][f"{what}tokens"] = tokens
        # A GPU may hold one of them, and not two.
        del policy
    write_json(job.result / "metrics.json", figures)
    before, after = (figures[name]["perplexity"] for name in ("before", "after"))
    print(f"perplexity {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    run(main)
