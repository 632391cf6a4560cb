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
# Rows per second of all GPUs; |Avg... is of whole steps of RLHF, Running... of one of its engines.
RATE, RLHF_RATE = rf"RunningAvgSamplesPerSec={N}", rf"\|AvgSamplesPerSec={N}"
LATENCY = rf"(?:E2E latency=|End-to-End => Latency: ){N}s"
MEMORY = rf"MaxMemAllocated={N}GB"

# Lines of metrics.jsonl, metrics.json and measurements of run.json.
Content = tuple[list[dict[str, Any]], dict[str, Any], dict[str, float]]


def read_log(path: Path, name: str, stage: str) -> Content:
    """Return what a log has of a training by the main of a stage.

    Args:
        path: The log.
        name: Its name in `logs`.
        stage: sft, reward, dpo or rlhf.

    Raises:
        InputError: It has no evaluation of this stage.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    pattern, keys = EVALUATIONS[stage]
    found = [
        {key: float(value) for key, value in zip(keys, match.groups(), strict=True) if value}
        for match in re.finditer(pattern, text)
    ]
    if not found:
        stages = (each for each, (other, _) in EVALUATIONS.items() if re.search(other, text))
        raise InputError(
            f"logs.{name}: {path} is a log of {next(stages, 'another program')}: expected one of"
            f" DeepSpeed-Chat's {stage}"
        )
    record: dict[str, float] = {}
    if rates := re.findall(RLHF_RATE if stage == "rlhf" else RATE, text):
        record["rows_per_second"] = float(rates[-1])
    if latencies := re.findall(LATENCY, text):
        record["seconds_per_step"] = statistics.median(map(float, latencies))
    if peaks := re.findall(MEMORY, text):
        record["peak_gpu_memory_mb"] = 1024 * float(peaks[-1])
    if stage == "rlhf":
        return [{"step": step, **values} for step, values in enumerate(found, 1)], {}, record
    # A training that has ended early has no evaluation after it.
    last = found[-1] if len(found) > 1 else {}
    return [], {"before": found[0], **({"after": last} if stage == "sft" else last)}, record
