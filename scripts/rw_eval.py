"""Score good and bad responses to prompts of users with a reward model.

scores.jsonl contains every pair, metrics.json how often the reward model ranks pairs correctly, and
the model that it was trained from, whose score head is random.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from snakechat.algorithms.preference import SCORE_ROUNDING
from snakechat.data.dialogues import render_response
from snakechat.data.encoder import Encoder, accepted
from snakechat.data.prompt_sets import read_pairs
from snakechat.data.tokenizers import load_tokenizer
from snakechat.evaluation.intervals import clusters_of, mean_with_interval
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Scorer, response_scores
from snakechat.training.metric_logs import write_json, write_json_lines
from snakechat.training.placed_models import load_frozen, start_evaluation
from snakechat.workflow.distributed import rank
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job, run

DTYPE = "fp32"


def main(job: Job[Any]) -> None:
    """Score the pairs, then write the scores and the metrics."""
    settings = job.settings
    pairs = read_pairs(settings.prompt_sets, Path(job.options.source))
    start_evaluation(job.placement, DTYPE)
    tokenizer = load_tokenizer(job.inputs["model"])
    examples = encode(pairs, Encoder(tokenizer, settings.template))
    scores = {}
    for name in ("base", "model"):
        torch.manual_seed(settings.seed)
        folder, placement = job.inputs[name], job.placement
        with load_frozen(
            Scorer, folder, DTYPE, tokenizer, placement, examples, new_head=name == "base"
        ) as model:
            scores[name] = response_scores(model.module, examples).astype(np.float64)
    if rank() > 0:
        return
    margins = {name: chosen - rejected for name, (chosen, rejected) in scores.items()}
    for name, differences in margins.items():
        differences[np.abs(differences) <= SCORE_ROUNDING * np.abs(scores[name]).sum(axis=0)] = 0
    columns = {
        "chosen_score": scores["model"][0],
        "rejected_score": scores["model"][1],
        "margin": margins["model"],
        "base_margin": margins["base"],
    }
    rows = [
        {"set": name, **pair, **{key: values[row].item() for key, values in columns.items()}}
        for row, (name, pair) in enumerate(pairs)
    ]
    write_json_lines(job.result / "scores.jsonl", rows)
    metrics = summarize(rows)
    sets = {
        set_name: summarize([row for row in rows if row["set"] == set_name])
        for set_name in settings.prompt_sets
    }
    write_json(job.result / "metrics.json", metrics | {"sets": sets})
    print("accuracy {accuracy:.4f}, ties {ties:.4f}, margin {margin:.4f}".format(**metrics))


def encode(pairs: Sequence[tuple[str, dict[str, str]]], encoder: Encoder) -> Examples:
    """Encode (set, pair) pairs as in training.

    Raises:
        InputError: A text contains a special token.
    """
    for _, pair in pairs:
        for key, text in pair.items():
            if encoder.has_special_token(text):
                raise InputError(f"{key} {text[:60]!r} contains a special token: remove it")
    texts = [[render_response(pair[key]) for _, pair in pairs] for key in ("chosen", "rejected")]
    turns = [[("user", pair["prompt"])] for _, pair in pairs]
    rows = accepted(encoder.conversations(turns, *texts))
    prompts, responses = zip(*rows, strict=True)
    return Examples(prompts, *zip(*responses, strict=True))


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return accuracy (a tie does not count as correct), ties and mean margin of scored pairs."""
    margins = np.array([row["margin"] for row in rows])
    base_margins = np.array([row["base_margin"] for row in rows])
    clusters = clusters_of(row["prompt"] for row in rows)
    shares = {"accuracy": margins > 0, "ties": margins == 0, "base_accuracy": base_margins > 0}
    found = {key: mean_with_interval(values, clusters) for key, values in shares.items()}
    return {
        "pairs": len(margins),
        "margin": float(margins.mean()),
        **{key: mean for key, (mean, _) in found.items()},
        "intervals_95": {key: interval for key, (_, interval) in found.items()},
    }


if __name__ == "__main__":
    run(main)
