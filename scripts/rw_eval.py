"""Score good and bad responses to prompts of users with a reward model.

scores.jsonl contains every pair, metrics.json the metrics of pairs, and under `base` the same of
the model that it was trained from, whose score head is random.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snakechat.algorithms.preference import SCORE_ROUNDING, pairwise_loss
from snakechat.data.dialogues import render_response
from snakechat.data.encoder import Encoder, accepted
from snakechat.data.tokenizers import load_tokenizer
from snakechat.data.yaml_files import PAIR_KEYS, read_prompts
from snakechat.evaluation.comparisons import clusters_of
from snakechat.evaluation.held_out_rows import (
    held_out_pair_metrics,
    metrics_by_dataset,
    pair_margins,
    reward_scores,
)
from snakechat.modeling.batching import Examples
from snakechat.workflow.job import Job, run, write_json, write_json_lines
from snakechat.workflow.processes import rank


def main(job: Job[Any]) -> None:
    """Score the pairs, encoded as in training, then write the scores and the metrics."""
    settings = job.settings
    folder = Path(job.options.source, "prompts/pairs")
    sets, pairs = zip(*read_prompts(settings.prompt_sets, folder, PAIR_KEYS), strict=True)
    encoder = Encoder(load_tokenizer(job.inputs["model"]), settings.template)
    for key in PAIR_KEYS:
        encoder.require_text(key, [pair[key] for pair in pairs])
    rows = (
        ([("user", pair["prompt"])], [render_response(pair[key]) for key in ("chosen", "rejected")])
        for pair in pairs
    )
    prompts, responses = zip(*accepted(encoder.conversations(rows)), strict=True)
    examples = Examples(prompts, *zip(*responses, strict=True))
    found = []
    for name in ("model", "base"):
        torch.manual_seed(settings.seed)
        found.append(reward_scores(job, name, examples))
    if rank() > 0:
        return
    # Of the model and its base model [2, 2, n].
    scores = torch.stack(found)
    rounding = SCORE_ROUNDING * scores.abs()
    columns = {
        "chosen_score": scores[0, 0],
        "rejected_score": scores[0, 1],
        "margin": pair_margins(scores[0], rounding[0]),
        "base_margin": pair_margins(scores[1], rounding[1]),
    }
    lines = [
        {"set": name, **pair, **{key: values[row].item() for key, values in columns.items()}}
        for row, (name, pair) in enumerate(zip(sets, pairs, strict=True))
    ]
    write_json_lines(job.result / "scores.jsonl", lines)
    losses = torch.stack([pairwise_loss(*of) for of in scores])
    lengths = torch.from_numpy(examples.response_lengths)
    clusters = torch.from_numpy(clusters_of(pair["prompt"] for pair in pairs))

    def metrics_of(
        losses: Tensor, scores: Tensor, lengths: Tensor, rounding: Tensor, clusters: Tensor
    ) -> dict[str, Any]:
        model, base = (
            held_out_pair_metrics(losses[n], scores[n], lengths, rounding[n], clusters)
            for n in range(2)
        )
        return model | {"base": base}

    tables = losses, scores, lengths, rounding, clusters
    metrics = metrics_by_dataset(metrics_of, Counter(sets), *tables)
    write_json(job.result / "metrics.json", metrics)
    print("accuracy {accuracy:.4f}, ties {ties:.4f}, margin {margin:.4f}".format(**metrics))


if __name__ == "__main__":
    run(main)
