"""Training logs of DeepSpeed-Chat, which comparisons show beside our trainings.

Its mains print an evaluation before training and after each epoch, in step 3 the mean reward of
each batch. Measurements are DeepSpeed's own.
"""

import re
import statistics
from pathlib import Path
from typing import Any

from snakechat.workflow.errors import InputError

N = r"(-?\d+(?:[.]\d*)?(?:e[+-]?\d+)?|-?inf|nan)"
# What the main of each stage prints of an evaluation, and our names of its numbers. Versions before
# 2023-08 print no score of rejected responses.
EVALUATIONS = {
    "sft": (rf"\bppl: {N}", ("perplexity",)),
    "reward": (
        rf"chosen_last_scores \(higher is better\) : {N}"
        rf"(?:, rejected_last_scores \(lower is better\) : {N})?, acc \(higher is better\) : {N}",
        ("chosen_score", "rejected_score", "accuracy"),
    ),
    "dpo": (
        rf"\bchosen: {N}, rejected: {N}, loss: {N}",
        ("chosen_score", "rejected_score", "loss"),
    ),
    "rlhf": (rf"(?i:average reward score): {N}", ("objective/scores",)),
}
EXAMPLES = {
    "sft": "ppl: 5.94",
    "reward": "chosen_last_scores (higher is better) : 2.24, acc (higher is better) : 0.7",
    "dpo": "chosen: -31.9, rejected: -34.0, loss: 0.665",
    "rlhf": "average reward score: 1.25",
}
# Of all GPUs; |Avg...| is of whole steps of RLHF, Running... of one of its two engines.
SAMPLES = re.compile(r"RunningAvgSamplesPerSec=([\d.]+)")
RLHF_SAMPLES = re.compile(r"\|AvgSamplesPerSec=([\d.]+)")
RLHF_LATENCY = re.compile(r"(?:E2E latency=|End-to-End => Latency: )([\d.]+)s")
MEMORY = re.compile(r"MaxMemAllocated=([\d.]+)GB")


def read_log(path: Path, name: str, stage: str) -> tuple[list[dict[str, Any]], dict, dict]:
    """Return a log as the lines of metrics.jsonl, as metrics.json and as measurements of run.json.

    Args:
        path: The log.
        name: Its name in `logs`.
        stage: sft, reward, dpo or rlhf.

    Raises:
        InputError: It has no evaluation by the main of this stage.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    found = _evaluations(text, stage)
    if not found:
        others = [other for other in EVALUATIONS if _evaluations(text, other)]
        what = f"is a log of {others[0]}" if others else "is no training log of DeepSpeed-Chat"
        raise InputError(
            f"logs.{name}: {path} {what}: expected lines of {stage} such as {EXAMPLES[stage]!r}"
        )
    is_rlhf = stage == "rlhf"
    rates = (RLHF_SAMPLES if is_rlhf else SAMPLES).findall(text)
    latencies, peaks = RLHF_LATENCY.findall(text), MEMORY.findall(text)
    record = {"rows_per_second": float(rates[-1])} if rates else {}
    if is_rlhf and latencies:
        record["seconds_per_step"] = statistics.median(map(float, latencies))
    if peaks:
        record["peak_gpu_memory_mb"] = 1024 * float(peaks[-1])
    if is_rlhf:
        return [{"step": step, **values} for step, values in enumerate(found, 1)], {}, record
    before, last = found[0], found[-1]
    if len(found) == 1:
        metrics: dict[str, Any] = {"before": before}
    elif stage == "sft":
        metrics = {"before": before, "after": last}
    else:
        metrics = {**last, "before": before}
    return [], metrics, record


def _evaluations(text: str, stage: str) -> list[dict[str, float]]:
    """Return the numbers of each evaluation that the main of a stage prints."""
    pattern, keys = EVALUATIONS[stage]
    return [
        {key: float(value) for key, value in zip(keys, match.groups(), strict=True) if value}
        for match in re.finditer(pattern, text)
    ]
