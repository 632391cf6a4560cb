"""A reward model on held-out pairs: strict accuracy, ties counted apart, calibration."""

import json

import torch

from snakechat.algorithms.preference import figures_by_dataset, pairwise_loss
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Scorer, response_scores
from snakechat.modeling.models import choose_device, load_scorer
from snakechat.training.metrics import write_json
from snakechat.workflow.job import run


def main(job):
    """Scores of both responses of each pair, and what "the longer one wins" would reach."""
    device = choose_device(job.placement)
    tokenizer = load_tokenizer(job.inputs["model"])
    scorer = Scorer(load_scorer(job.inputs["model"], "fp32", tokenizer)).to(device)
    pairs = Examples.read(job.inputs["tokens"], "eval", "chosen", "rejected")
    scores = torch.from_numpy(response_scores(scorer, pairs, job.placement["micro_batch_tokens"]))
    losses = pairwise_loss(*scores)
    stats = json.loads((job.inputs["tokens"] / "stats.json").read_text())
    kept_of = {name: stats["eval"]["kept_of"][name] for name in job.settings.datasets}
    figures = figures_by_dataset(losses, scores, torch.from_numpy(pairs.response_lengths), kept_of)
    write_json(job.result / "metrics.json", figures)
    told = ("accuracy", "ties", "longer_wins_accuracy")
    print(", ".join(f"{name} {figures[name]:.4f}" for name in told))


if __name__ == "__main__":
    run(main)
