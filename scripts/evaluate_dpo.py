"""Implicit rewards of a DPO model on held-out pairs: accuracy, margin, loss, calibration."""

import json

import numpy as np
import torch

from snakechat.algorithms.preference import dpo_loss, figures_by_dataset, implicit_rewards
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, response_logprobs
from snakechat.modeling.models import choose_device, load_causal
from snakechat.training.metrics import write_json
from snakechat.workflow.job import run


def main(job):
    """Rewards of both responses of each pair, and what "the longer one wins" would reach."""
    settings = job.settings
    device = choose_device(job.placement)
    tokenizer = load_tokenizer(job.inputs["model"])
    policy = Policy(load_causal(job.inputs["model"], settings.dtype, tokenizer)).to(device)
    pairs = Examples.read(job.inputs["tokens"], "eval", "chosen", "rejected")
    logprobs = response_logprobs(policy, pairs, job.placement["micro_batch_tokens"])
    ref_logprobs = np.load(job.inputs["reference"] / "eval.npy").astype(np.float64)
    rewards = torch.from_numpy(implicit_rewards(logprobs, ref_logprobs, settings.beta))
    losses = dpo_loss(*rewards, settings.label_smoothing)
    stats = json.loads((job.inputs["tokens"] / "stats.json").read_text())
    kept_of = {name: stats["eval"]["kept_of"][name] for name in settings.datasets}
    figures = figures_by_dataset(losses, rewards, torch.from_numpy(pairs.response_lengths), kept_of)
    write_json(job.result / "metrics.json", figures)
    told = ("accuracy", "ties", "longer_wins_accuracy")
    print(", ".join(f"{name} {figures[name]:.4f}" for name in told))


if __name__ == "__main__":
    run(main)
