"""Evaluate a reward model on RewardBench 2: whether it scores the chosen response highest.

The model scores in fp32. metrics.json has the score of each subset and their mean, scores.jsonl the
scores of all responses.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from snakechat.algorithms.reward_models import max_positions, sequence_scores
from snakechat.data.conversations import TurnEncoder
from snakechat.data.dataset_files import unsplit_files
from snakechat.data.dialogues import render_prompt, render_response
from snakechat.data.reward_bench import BenchPrompt, read_bench_prompts
from snakechat.data.tokenizers import load_tokenizer
from snakechat.evaluation.reward_bench import Margins, best_of_n_credit, margins, mean, ties_metrics
from snakechat.reporting.intervals import proportion_interval
from snakechat.training.evaluated_models import loaded_scorer, start_evaluation
from snakechat.training.metrics import write_json
from snakechat.workflow.distributed import rank
from snakechat.workflow.errors import InputError
from snakechat.workflow.external_files import planned_files, unchanged_files
from snakechat.workflow.job import Job, run

DTYPE = "fp32"
# Scores of the chosen and of the rejected responses of a prompt.
Scores = tuple[list[float], list[float]]


def main(job: Job[Any]) -> None:
    """Score all responses, then write the scores and the metrics."""
    with source_files(job) as paths:
        prompts = read_bench_prompts(paths)
    start_evaluation(job.placement, DTYPE)
    scores, truncated = score_responses(job, prompts)
    if rank() > 0:
        return
    with open(job.result / "scores.jsonl", "w") as file:
        for prompt, (chosen, rejected) in zip(prompts, scores, strict=True):
            row = {"id": prompt.id, "subset": prompt.subset, "chosen": chosen, "rejected": rejected}
            file.write(json.dumps(row) + "\n")
    by_subset = metrics_by_subset(prompts, scores)
    metrics = {
        "prompts": len(prompts),
        "truncated": truncated,
        "score": mean([subset["score"] for subset in by_subset.values()]),
        "by_subset": by_subset,
    }
    write_json(job.result / "metrics.json", metrics)
    for name, subset in by_subset.items():
        print(f"{name}: {subset['score']:.4f} of {subset['prompts']:,} prompts")
    print(f"score {metrics['score']:.4f}, {truncated:,} truncated conversations")


@contextmanager
def source_files(job: Job[Any]) -> Iterator[list[Path]]:
    """Yield the files of the benchmark, which must not change until the end of the context."""
    if hasattr(job.settings, "hub"):
        paths = hub_files(job)
        with unchanged_files(paths):
            yield paths
    else:
        source = Path(job.placement["source"])
        planned = {source / name: digest for name, digest in job.spec["files"].items()}
        with planned_files(planned):
            yield list(planned)


def hub_files(job: Job[Any]) -> list[Path]:
    """Return the files of a hub source; record its commit and licence."""
    # Imported here because it takes a second, which other sources need not spend.
    from snakechat.data.cards import card_facts
    from snakechat.data.hub import fetch
    from snakechat.data.model_files import CARD

    settings = job.settings

    def choose(paths: list[str]) -> list[str]:
        try:
            chosen = unsplit_files(paths)
        except InputError as error:
            raise InputError(f"hub dataset {settings.hub}: {error}") from None
        return [*chosen, CARD] if CARD in paths else chosen

    folder, paths, commit = fetch(settings.hub, "dataset", settings.revision, choose)
    job.facts |= {"commit": commit, "licence": card_facts(folder)["licence"]}
    return [folder / path for path in paths if path != CARD]


def score_responses(job: Job[Any], prompts: Sequence[BenchPrompt]) -> tuple[list[Scores], int]:
    """Return the scores of each prompt's responses, and how many conversations were truncated."""
    folder = job.inputs["model"]
    tokenizer = load_tokenizer(folder)
    # As the model's training data.
    encoder = TurnEncoder(tokenizer, job.settings.template)
    texts = [
        (render_prompt([("user", prompt.prompt)]), render_response(response))
        for prompt in prompts
        for response in (*prompt.chosen, *prompt.rejected)
    ]
    sequences = encoder(*zip(*texts, strict=True))
    with loaded_scorer(folder, DTYPE, tokenizer, job.placement) as model:
        positions = max_positions(model.module)
        max_tokens = job.placement["micro_batch_tokens"]
        scores = iter(sequence_scores(model.module, sequences, max_tokens).tolist())
    truncated = sum(positions is not None and len(ids) > positions for ids in sequences)
    of_prompts = [
        ([next(scores) for _ in prompt.chosen], [next(scores) for _ in prompt.rejected])
        for prompt in prompts
    ]
    return of_prompts, truncated


def metrics_by_subset(
    prompts: Sequence[BenchPrompt], scores: Sequence[Scores]
) -> dict[str, dict[str, Any]]:
    """Return the metrics of each subset, in the order of their first prompts."""
    subsets: dict[str, list[tuple[BenchPrompt, Scores]]] = {}
    for prompt, of_prompt in zip(prompts, scores, strict=True):
        subsets.setdefault(prompt.subset, []).append((prompt, of_prompt))
    return {name: summarize(of_subset) for name, of_subset in subsets.items()}


def summarize(scored: Sequence[tuple[BenchPrompt, Scores]]) -> dict[str, Any]:
    """Return the weighted score of Ties and its terms, or the accuracy of another subset.

    The accuracy has an interval; the weighted score is no proportion.
    """
    if scored[0][0].is_ties:
        by_kind: dict[str, dict[str, Margins]] = {"ref": {}, "tied": {}}
        for prompt, of_prompt in scored:
            kind, _, number = prompt.id.partition(":")
            by_kind[kind][number] = margins(*of_prompt)
        return {"prompts": len(scored), **ties_metrics(**by_kind)}
    accuracy = mean([best_of_n_credit(*of_prompt) for _, of_prompt in scored])
    interval = proportion_interval(accuracy, len(scored))
    return {"prompts": len(scored), "score": accuracy, "interval_95": interval}


if __name__ == "__main__":
    run(main)
