"""Prompts of an evaluation: drawn in proportion from a blend, and compared with training rows."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from snakechat.data.dialogues import render_prompt
from snakechat.data.ragged_arrays import read_statistics
from snakechat.data.records import fingerprint, read_record_batches


def draw_held_out_prompts(tokens: Path, num_prompts: int, seed: int) -> tuple[list[int], list[int]]:
    """Draw prompts of the eval split without replacement, from each dataset its share of the blend.

    Shares are rounded by the method of Webster and Sainte-Laguë, which takes one prompt after the
    other, so that any first part of the prompts is in proportion too.

    Args:
        tokens: Tokens of stage rlhf.
        num_prompts: Upper limit for the number of prompts.

    Returns:
        The row of each prompt [n], and the place of its dataset in the blend.
    """
    statistics = read_statistics(tokens, "eval")
    kept_of = statistics["kept_of"]
    quotients = (
        (-size * weight / (2 * count + 1), place)
        for place, (size, weight) in enumerate(zip(kept_of, statistics["weights"], strict=True))
        for count in range(min(size, num_prompts))
    )
    datasets = [place for _, place in sorted(quotients)[:num_prompts]]
    generator = np.random.default_rng(seed)
    rows_of = [
        iter(np.sort(generator.permutation(size)[: datasets.count(place)]) + start)
        for place, (size, start) in enumerate(zip(kept_of, accumulate([0, *kept_of]), strict=False))
    ]
    return [int(next(rows_of[dataset])) for dataset in datasets], datasets


def normalized_fingerprints(texts: Iterable[str]) -> np.ndarray:
    """Return hashes of texts in lower case without punctuation, apart from operators."""
    normalized = (re.sub(r"[^\w+*/=<>^%-]+", " ", text.casefold()) for text in texts)
    return np.array([*map(fingerprint, normalized)], np.uint64)


def count_contamination(
    prompts: Sequence[str], phases_of: Mapping[str, Sequence[str]], inputs: Mapping[str, Path]
) -> dict[str, int]:
    """Count evaluation prompts that are training prompts of a phase too; print a note if any are.

    Texts count as equal if they are but for case, whitespace and punctuation.

    Args:
        phases_of: Phases that the models were trained on, of each dataset.
        inputs: Folders of the job's inputs: records.DATASET and rows.DATASET.

    Returns:
        The number of such prompts of each PHASE/DATASET.
    """
    evaluated = normalized_fingerprints(prompts)
    counts = {}
    for dataset, phases in phases_of.items():
        records = inputs[f"records.{dataset}"] / "train.parquet"
        for phase in phases:
            rows = np.load(inputs[f"rows.{dataset}"] / f"{phase}.train.npy")
            found = np.zeros(len(prompts), bool)
            for batch in read_record_batches(records, rows, columns=["prompt"]):
                trained_on = normalized_fingerprints(map(render_prompt, batch["prompt"]))
                found |= np.isin(evaluated, trained_on)
            counts[f"{phase}/{dataset}"] = int(found.sum())
            if found.any():
                print(
                    f"note: {found.sum():,} of {len(prompts):,} evaluation prompts are also"
                    f" training prompts of {phase}/{dataset}: set split.by: prompt, or use other"
                    " datasets",
                    file=sys.stderr,
                )
    return counts
