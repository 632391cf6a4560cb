"""Score good and bad responses to prompts of users with a reward model.

scores.jsonl contains every pair, metrics.json how often the reward model ranks pairs correctly,
scores.html is the page.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from snakechat.data.dialogues import render_response
from snakechat.data.encoder import Encoder
from snakechat.data.prompt_sets import read_pairs
from snakechat.data.tokenizers import load_tokenizer
from snakechat.evaluation.intervals import clusters_of, mean_with_interval
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import response_scores
from snakechat.reporting.labels import N_, label_of
from snakechat.reporting.metric_tables import figure_cell
from snakechat.reporting.metric_values import Figure, read_figure
from snakechat.reporting.page_parts import Card, Page, Section, Table
from snakechat.reporting.page_rendering import write_page
from snakechat.reporting.translations import set_language, translate
from snakechat.training.evaluated_models import loaded_scorer, start_evaluation
from snakechat.training.metric_logs import write_json
from snakechat.workflow.distributed import rank
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job, run

DTYPE = "fp32"
HEAD = (
    *(N_("prompt"), N_("good response (chosen)"), N_("score")),
    *(N_("bad response (rejected)"), N_("score"), N_("margin")),
)


def main(job: Job[Any]) -> None:
    """Score the pairs, then write the scores, the metrics and the page."""
    folder, settings = job.inputs["model"], job.settings
    pairs = read_pairs(job.settings.prompt_sets, job.spec["files"], Path(job.options.source))
    tokenizer = load_tokenizer(folder)
    start_evaluation(job.placement, DTYPE)
    examples = encode(pairs, Encoder(tokenizer, settings.template))
    with loaded_scorer(folder, DTYPE, tokenizer, job.placement, examples) as model:
        scores = response_scores(model.module, examples, job.placement.micro_batch_tokens)
    if rank() > 0:
        return
    rows = [
        {
            "set": set_name,
            **pair,
            "chosen_score": chosen_score,
            "rejected_score": rejected_score,
            "margin": chosen_score - rejected_score,
        }
        for (set_name, pair), (chosen_score, rejected_score) in zip(
            pairs, scores.T.tolist(), strict=True
        )
    ]
    with open(job.result / "scores.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    by_set = {
        set_name: [row for row in rows if row["set"] == set_name]
        for set_name in settings.prompt_sets
    }
    metrics = summarize(rows)
    sets = {set_name: summarize(of_set) for set_name, of_set in by_set.items()}
    write_json(job.result / "metrics.json", metrics | {"sets": sets})
    print("accuracy {accuracy:.4f}, ties {ties:.4f}, margin {margin:.4f}".format(**metrics))
    write_scores(job, metrics, by_set)


def encode(pairs: Sequence[tuple[str, dict[str, str]]], encoder: Encoder) -> Examples:
    """Encode (set, pair) pairs as in training.

    Raises:
        InputError: A text contains a special token.
    """
    for _, pair in pairs:
        for key, text in pair.items():
            if encoder.has_special_token(text):
                raise InputError(f"{key} {text[:60]!r} contains a special token: remove it")
    prompts = encoder.prompts([[("user", pair["prompt"])] for _, pair in pairs])
    responses = [
        encoder.responses([render_response(pair[key]) for _, pair in pairs])
        for key in ("chosen", "rejected")
    ]
    return Examples(prompts, *responses)


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return accuracy (a tie does not count as correct), ties and mean margin of scored pairs."""
    margins = np.array([row["margin"] for row in rows])
    clusters = clusters_of(row["prompt"] for row in rows)
    accuracy, ties = (
        mean_with_interval(values, clusters) for values in (margins > 0, margins == 0)
    )
    return {
        "pairs": len(margins),
        "accuracy": accuracy[0],
        "ties": ties[0],
        "margin": float(margins.mean()),
        "intervals_95": {"accuracy": accuracy[1], "ties": ties[1]},
    }


def write_scores(
    job: Job[Any], metrics: dict[str, Any], by_set: dict[str, list[dict[str, Any]]]
) -> None:
    """Write the page: a table for each set, with a row for each pair."""
    set_language(job.settings.language)
    head = ["", *map(translate, HEAD)]
    sections = [
        Section(name, tables=[Table("", head, list(pair_rows(rows)), has_texts=True)])
        for name, rows in by_set.items()
    ]
    page = Page(
        eyebrow=translate("Scores of good and bad responses"),
        title=f"reward/{job.spec['name']}",
        cards=[
            Card(label_of(key), cell.value, cell.interval)
            for key in ("accuracy", "ties")
            if (figure := read_figure(metrics, key)) and (cell := figure_cell(key, figure))
        ],
        sections=sections,
    )
    write_page(job.result / "scores.html", job.settings.language, page)


def pair_rows(rows: Sequence[dict[str, Any]]) -> Iterator[list[Any]]:
    """Yield the cells of HEAD for each pair: a positive margin is better, a negative one worse."""
    for number, row in enumerate(rows, 1):
        margin = Figure(row["margin"], [row["margin"]] * 2)
        yield [
            str(number),
            row["prompt"],
            *(row["chosen"], figure_cell("score", Figure(row["chosen_score"]))),
            *(row["rejected"], figure_cell("score", Figure(row["rejected_score"]))),
            figure_cell("score", margin, is_difference=True)._replace(interval=""),
        ]


if __name__ == "__main__":
    run(main)
