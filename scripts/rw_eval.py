"""Score good and bad responses to prompts of users with a reward model.

scores.jsonl contains every pair, metrics.json the metrics of pairs, and under `base` the same of
the model that it was trained from, whose score head is random.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from snakechat.algorithms.preference import SCORE_ROUNDING, pairwise_loss
from snakechat.data.dialogues import render_response
from snakechat.data.encoder import Encoder, accepted
from snakechat.data.tokenizers import load_tokenizer
from snakechat.data.yaml_files import PAIR_KEYS, read_prompts
from snakechat.evaluation.held_out_rows import (
    held_out_pair_metrics,
    metrics_by_dataset,
    pair_margins,
    reward_scores,
)
from snakechat.evaluation.intervals import clusters_of
from snakechat.modeling.batching import Examples
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job, run, write_json, write_json_lines
from snakechat.workflow.processes import rank


def main(job: Job[Any]) -> None:
    """Score the pairs, encoded as in training, then write the scores and the metrics."""
    settings = job.settings
    folder = Path(job.options.source, "prompts/pairs")
    sets, pairs = zip(*read_prompts(settings.prompt_sets, folder, PAIR_KEYS), strict=True)
    encoder = Encoder(load_tokenizer(job.inputs["model"]), settings.template)
    for key, text in (item for pair in pairs for item in pair.items()):
        if encoder.has_special_token(text):
            raise InputError(f"{key} {text[:60]!r} contains a special token: remove it")
    rows = (
        ([("user", pair["prompt"])], [render_response(pair[key]) for key in ("chosen", "rejected")])
        for pair in pairs
    )
    prompts, responses = zip(*accepted(encoder.conversations(rows)), strict=True)
    examples = Examples(prompts, *zip(*responses, strict=True))
    scores = {}
    for name in ("model", "base"):
        torch.manual_seed(settings.seed)
        scores[name] = reward_scores(job, name, examples)
    rounding = {name: SCORE_ROUNDING * of.abs() for name, of in scores.items()}
    if rank() > 0:
        return
    margins = {name: pair_margins(of, rounding[name]) for name, of in scores.items()}
    columns = dict(zip(("chosen_score", "rejected_score"), scores["model"], strict=True))
    columns |= {"margin": margins["model"], "base_margin": margins["base"]}
    lines = [
        {"set": name, **pair, **{key: values[row].item() for key, values in columns.items()}}
        for row, (name, pair) in enumerate(zip(sets, pairs, strict=True))
    ]
    write_json_lines(job.result / "scores.jsonl", lines)
    lengths = torch.from_numpy(examples.response_lengths)
    clusters = torch.from_numpy(clusters_of(pair["prompt"] for pair in pairs))

    def metrics_of(rows: slice) -> dict[str, Any]:
        found = {}
        for name, of in scores.items():
            tensors = pairwise_loss(*of), of, lengths, rounding[name], clusters
            found[name] = held_out_pair_metrics(*(tensor[..., rows] for tensor in tensors))
        return found["model"] | {"base": found["base"]}

    metrics = metrics_by_dataset(metrics_of, Counter(sets))
    write_json(job.result / "metrics.json", metrics)
    print("accuracy {accuracy:.4f}, ties {ties:.4f}, margin {margin:.4f}".format(**metrics))


if __name__ == "__main__":
    run(main)
