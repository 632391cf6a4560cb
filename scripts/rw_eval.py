"""Score good and bad responses to prompts of users with a reward model.

scores.jsonl contains every pair, metrics.json how often the reward model ranks pairs correctly,
scores.html is the page.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from snakechat.data.dialogues import render_response
from snakechat.data.prompt_sets import read_pairs
from snakechat.data.tokenizers import Encoder, load_tokenizer
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import response_scores
from snakechat.modeling.models import max_positions
from snakechat.reporting.html_pages import write_html
from snakechat.reporting.intervals import proportion_interval
from snakechat.reporting.labels import N_
from snakechat.reporting.page_parts import Card, format_interval, format_metric
from snakechat.reporting.plots import Panel, draw_dumbbells
from snakechat.reporting.translations import Translate, translator
from snakechat.training.evaluated_models import loaded_scorer, start_evaluation
from snakechat.training.metrics import write_json
from snakechat.workflow.distributed import rank
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job, run

DTYPE = "fp32"
# What the reward model prefers.
WINNERS = {"chosen": N_("chosen"), "rejected": N_("rejected"), "tie": N_("tie")}


def main(job: Job[Any]) -> None:
    """Score the pairs, then write the scores, the metrics and the page."""
    folder, settings = job.inputs["model"], job.settings
    pairs = read_pairs(job.settings.prompt_sets, job.spec["files"], Path(job.placement["source"]))
    tokenizer = load_tokenizer(folder)
    start_evaluation(job.placement, DTYPE)
    examples = encode(pairs, Encoder(tokenizer, settings.template))
    with loaded_scorer(folder, DTYPE, tokenizer, job.placement, examples) as model:
        check_length(examples, model.module.model, folder)
        scores = response_scores(model.module, examples, job.placement["micro_batch_tokens"])
    if rank() > 0:
        return
    rows = [
        {"set": set_name, **pair, **compare_scores(*map(float, pair_scores))}
        for (set_name, pair), pair_scores in zip(pairs, scores.T, strict=True)
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


def check_length(examples: Examples, model: PreTrainedModel, folder: Path) -> None:
    """Check that the model has positions for all pairs.

    Raises:
        InputError: A prompt and its response are longer.
    """
    positions = max_positions(model)
    longest = int((examples.prompt_lengths + examples.response_lengths).max())
    if positions is not None and longest > positions:
        raise InputError(
            f"{folder} has {positions} positions, and the longest prompt and response have"
            f" {longest} tokens: shorten them"
        )


def compare_scores(chosen_score: float, rejected_score: float) -> dict[str, Any]:
    """Return the scores of a pair, their margin and which response wins."""
    margin = chosen_score - rejected_score
    winner = "tie" if margin == 0 else "chosen" if margin > 0 else "rejected"
    scores = {"chosen_score": chosen_score, "rejected_score": rejected_score}
    return {**scores, "margin": margin, "winner": winner}


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return accuracy (a tie does not count as correct), ties and mean margin of scored pairs."""
    winners = [row["winner"] for row in rows]
    return {
        "pairs": len(rows),
        "accuracy": winners.count("chosen") / len(rows),
        "ties": winners.count("tie") / len(rows),
        "margin": sum(row["margin"] for row in rows) / len(rows),
    }


def write_scores(
    job: Job[Any], metrics: dict[str, float], by_set: dict[str, list[dict[str, Any]]]
) -> None:
    """Write the page: a table for each set, with a row for each pair."""
    translate = translator(job.settings.language)
    write_html(
        job.result / "scores.html",
        "rw_eval.html",
        job.settings.language,
        eyebrow=translate("Scores of good and bad responses"),
        title=f"reward/{job.spec['name']}",
        cards=list(summary_cards(metrics, translate)),
        sets=by_set,
        panels={set_name: score_panel(rows, translate) for set_name, rows in by_set.items()},
        legend=[translate("good response (chosen)"), translate("bad response (rejected)")],
        winners={winner: translate(label) for winner, label in WINNERS.items()},
    )


def summary_cards(metrics: dict[str, float], translate: Translate) -> Iterator[Card]:
    """Yield accuracy with its interval, ties and margin."""
    interval = proportion_interval(metrics["accuracy"], int(metrics["pairs"]))
    count = translate("{count} pairs", count=metrics["pairs"])
    note = f"{format_interval('accuracy', interval)}, {count}"
    yield Card(translate("accuracy"), format_metric("accuracy", metrics["accuracy"]), note)
    yield Card(translate("ties"), format_metric("ties", metrics["ties"]))
    label = translate("mean margin of chosen over rejected")
    yield Card(label, format_metric("margin", metrics["margin"], signed=True))


def score_panel(rows: Sequence[dict[str, Any]], translate: Translate) -> Panel:
    """Return the figure of the scores of pairs, numbered as in the table."""
    title = translate("scores of each pair")
    pairs = {
        str(number): (row["chosen_score"], row["rejected_score"])
        for number, row in enumerate(rows, 1)
    }
    caption = translate("A pair whose good response (circle) is on the right is ranked correctly.")
    return Panel(title, draw_dumbbells(title, pairs, translate("score")), caption)


if __name__ == "__main__":
    run(main)
