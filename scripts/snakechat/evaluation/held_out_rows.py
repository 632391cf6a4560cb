"""Held-out rows: their metrics with intervals, of all and of each dataset, and responses to them.

Rows are single responses, pairs, or labelled responses (KTO). Shapes: n rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from snakechat.algorithms.preference import labelled_metrics, pair_metrics, placements
from snakechat.algorithms.rollouts import sample_on_all_ranks
from snakechat.data.chat_templates import stop_ids
from snakechat.data.ragged_arrays import Ragged, read_statistics, whole_lengths_path
from snakechat.data.tokenizers import load_tokenizer
from snakechat.evaluation.comparisons import clusters_of, mean_with_interval, share_interval
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, Scorer, response_scores
from snakechat.modeling.generation import Sampler
from snakechat.modeling.models import check_sequence_length, max_positions
from snakechat.training.engine import FrozenModel
from snakechat.training.placed_models import load_frozen
from snakechat.workflow.job import Job, write_json, write_json_lines
from snakechat.workflow.processes import rank

# Held-out prompts that reports show, and tokens of a response to one of them.
PROMPTS, MAX_RESPONSE_LENGTH = 10, 256

# A response as text, and whether it ended: {"text", "ended"}.
Response = dict[str, Any]


def write_metrics(
    job: Job[Any], metrics_of: Callable[..., dict[str, Any]], *tables: Any
) -> dict[str, Any]:
    """Write metrics.json of the rows, and return it.

    metrics_of: Returns metrics from the tables [..., n] and the cluster of each row [n].
    """
    prompts = Ragged(job.inputs["tokens"], "eval.prompt")
    clusters = torch.from_numpy(clusters_of(tuple(prompts[row]) for row in range(len(prompts))))
    # A single dataset has no name here.
    numbers = read_statistics(job.inputs["tokens"], "eval")["kept_of"]
    rows_of = dict(zip(job.settings.datasets or [""], numbers, strict=True))
    metrics = metrics_by_dataset(metrics_of, rows_of, *tables, clusters)
    write_json(job.result / "metrics.json", metrics)
    return metrics


def metrics_by_dataset(
    metrics_of: Callable[..., dict[str, Any]], rows_of: Mapping[str, int], *tables: Any
) -> dict[str, Any]:
    """Return the metrics of all rows; of each dataset under by_dataset, if several have rows.

    Args:
        metrics_of: Returns metrics from the tables [..., n], or from these of some rows.
        rows_of: The number of rows of each dataset, in their order.
    """
    metrics = metrics_of(*tables)
    names = [name for name, number in rows_of.items() if number]
    if len(names) > 1:
        bounds = pairwise(accumulate((rows_of[name] for name in names), initial=0))
        metrics["by_dataset"] = {
            name: metrics_of(*(table[..., slice(*rows)] for table in tables))
            for name, rows in zip(names, bounds, strict=True)
        }
    return metrics


# --- pairs, and labelled responses ----------------------------------------------------------------


def calibration_error(margins: Tensor, num_bins: int = 15) -> float:
    """Return the expected calibration error of margins [n] (Guo et al. 2017, eq. 3, 15 bins).

    The confidence of a pair is sigmoid(|margin|), from 1/2 to 1: the probability of the response
    with the higher score under the Bradley-Terry model. The error is the mean distance of accuracy
    and confidence, over bins of pairs with similar confidences.
    """
    confidences = torch.sigmoid(margins.abs())
    correct = (margins > 0).to(confidences.dtype)
    bin_of = ((confidences - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)
    distances = confidences.new_zeros(num_bins).index_add(0, bin_of, correct - confidences)
    return (distances.abs().sum() / len(margins)).item()


def pair_margins(scores: Tensor, rounding: Tensor) -> Tensor:
    """Return chosen - rejected score [n] of scores [2, n]; 0 within rounding errors [2, n]."""
    margins = scores[0] - scores[1]
    return margins.where(margins.abs() > rounding.sum(dim=0), 0)


def reward_scores(job: Job[Any], name: str, examples: Examples) -> Tensor:
    """Return the scores [A, n] of responses by a reward model of the job, in fp32.

    Its base model gets a new head, from the seed of torch.

    name: Of the job's input, `model` or `base`.
    """
    folder, tokenizer = job.inputs[name], load_tokenizer(job.inputs["model"])
    arguments = folder, "fp32", tokenizer, job.placement, examples
    with load_frozen(Scorer, *arguments, new_head=name == "base") as model:
        return torch.from_numpy(response_scores(model.module, examples))


def held_out_pair_metrics(
    losses: Tensor, scores: Tensor, lengths: Tensor, rounding: Tensor, clusters: Tensor
) -> dict[str, Any]:
    """Return pair_metrics, calibration_error, and the accuracy of choosing the longer response.

    Losses and clusters are [n]; scores, lengths, rounding [2, n], of chosen and rejected responses.
    """
    margins = pair_margins(scores, rounding)
    shares = {
        "accuracy": margins > 0,
        "ties": margins == 0,
        "longer_wins_accuracy": lengths[0] > lengths[1],
    }
    found = {n: mean_with_interval(each.numpy(), clusters.numpy()) for n, each in shares.items()}
    return {
        "pairs": len(losses),
        **pair_metrics(losses, scores, rounding.sum(dim=0)),
        "calibration_error": calibration_error(margins),
        "longer_wins_accuracy": found["longer_wins_accuracy"][0],
        "intervals_95": {name: interval for name, (_, interval) in found.items()},
    }


def held_out_labelled_metrics(
    losses: Tensor, scores: Tensor, lengths: Tensor, rounding: Tensor, clusters: Tensor
) -> dict[str, Any]:
    """Return labelled_metrics; and longer_wins_auc, the AUC of the length as a score.

    Good and bad responses have the shapes of held_out_pair_metrics. Length 0: there is none.
    """
    present = lengths > 0
    limit = 2 * rounding[present].mean().item()
    metrics: dict[str, Any] = labelled_metrics(losses, scores, present, limit)
    metrics["intervals_95"] = {}
    if present.any(dim=1).all():
        tables = {"auc": (scores, limit), "longer_wins_auc": (lengths.double(), 0.0)}
        for name, (table, tied) in tables.items():
            metrics[name], metrics["intervals_95"][name] = auc_with_interval(
                (table[0][present[0]], table[1][present[1]]),
                (clusters[present[0]], clusters[present[1]]),
                tied,
            )
    return metrics


def auc_with_interval(
    scores: tuple[Tensor, Tensor], clusters: tuple[Tensor, Tensor], rounding: float = 0.0
) -> tuple[float, list[float]]:
    """Return the area under the ROC curve of good and bad responses, and its 95 % interval.

    DeLong et al. 1988 have its variance, Obuchowski 1997 its variance over clusters.

    rounding: Scores that differ by no more are ties.
    """
    good, bad = scores
    of_good, of_bad = placements(good, bad, rounding), 1 - placements(bad, good, rounding)
    auc = of_good.mean().item()
    influences = torch.cat([(of_good - auc) / len(good), (of_bad - auc) / len(bad)])
    # The fewer of the two determine the degrees of freedom.
    count = min(len(each.unique()) for each in clusters)
    interval = share_interval(auc, influences.numpy(), torch.cat(clusters).numpy(), count)
    return auc, interval


def write_pair_metrics(
    job: Job[Any], losses: Tensor, scores: Tensor, rounding: Tensor, labelled: bool = False
) -> None:
    """Write metrics.json of the rows of the evaluation split, and print a summary.

    Shapes as of held_out_pair_metrics.

    labelled: Whether the responses are labelled good or bad, and make no pairs.
    """
    lengths = np.load(whole_lengths_path(job.inputs["tokens"], "eval"), allow_pickle=False)
    metrics_of = held_out_labelled_metrics if labelled else held_out_pair_metrics
    metrics = write_metrics(job, metrics_of, losses, scores, torch.from_numpy(lengths), rounding)
    summary = ("responses", "share_good", "auc") if labelled else ("accuracy", "ties")
    print(", ".join(f"{name} {metrics[name]:.4g}" for name in summary if name in metrics))


# --- responses ------------------------------------------------------------------------------------


def sampled_models(
    job: Job[Any], dtype: str, examples: Examples, names: Mapping[str, str]
) -> Iterator[tuple[str, FrozenModel[Policy]]]:
    """Yield language models one after the other, and write responses to held-out prompts.

    The responses of the rows themselves come first, under "data". Each model responds with greedy
    decoding once the caller is done with it, and is closed then. All processes take all models.

    names: Names of the models in responses.jsonl, by the job's inputs. `model` is among them.
    """
    tokenizer = load_tokenizer(job.inputs["model"])
    rows, tables = first_prompts(examples), (examples.prompts, examples.responses[0])
    prompts, own = ([list(map(int, table[row])) for row in rows] for table in tables)
    texts = {"data": tokenizer.batch_decode(own, skip_special_tokens=True)}
    for key, name in names.items():
        arguments = job.inputs[key], dtype, tokenizer, job.placement, examples
        with load_frozen(Policy, *arguments, samples=True) as model:
            yield key, model
            responses = respond(model, tokenizer, job.inputs[key], prompts, MAX_RESPONSE_LENGTH, 0)
            texts[name] = [response["text"] for response in responses]
    if rank() == 0:
        shown = tokenizer.batch_decode(prompts, skip_special_tokens=True)
        lines = [
            {"model": name, "prompt": prompt, "response": text}
            for name, of_model in texts.items()
            for prompt, text in zip(shown, of_model, strict=True)
        ]
        write_json_lines(job.result / "responses.jsonl", lines)


def respond(
    policy: FrozenModel[Policy],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    max_response_length: int,
    temperature: float,
) -> list[Response]:
    """Return a response to the token ids of each prompt. All processes of the job call it together.

    The longest prompt limits all responses: InputError if it leaves no positions.

    Args:
        folder: The folder of the model, which names the tokens that end a response.
        temperature: 0 is greedy decoding.
    """
    ends, longest = stop_ids(tokenizer, folder), max(map(len, prompts))
    check_sequence_length(policy.module.model, longest + 1)
    positions = max_positions(policy.module.model)
    length = min(max_response_length, positions - longest) if positions else max_response_length
    sampler = Sampler(ends, length, temperature)
    sampler.update(policy.module.model)
    [responses], _ = sample_on_all_ranks(sampler, prompts, policy.sampling)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return [
        {"text": text, "ended": bool(ids) and ids[-1] in ends}
        for text, ids in zip(texts, responses, strict=True)
    ]


def first_prompts(examples: Examples) -> list[int]:
    """Return the rows of the first different prompts."""
    clusters = clusters_of(tuple(examples.prompts[row]) for row in range(len(examples)))
    return list(map(int, np.unique(clusters, return_index=True)[1][:PROMPTS]))
