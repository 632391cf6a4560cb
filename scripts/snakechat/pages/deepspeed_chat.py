"""Training logs of DeepSpeed-Chat, which comparisons show beside our trainings.

Its mains print an evaluation before training and after each epoch, in step 3 the mean reward of
each batch. Measurements are DeepSpeed's own.
"""

import re
import statistics
from pathlib import Path
from typing import Any

import yaml

from snakechat.pages.metrics import STAGES
from snakechat.pages.texts import TABLES
from snakechat.workflow.errors import InputError

NUMBER = r"(-?\d+(?:[.]\d*)?(?:e[+-]?\d+)?|-?inf|nan)"
PRINTED = yaml.safe_load(
    (TABLES / "deepspeed_chat.yaml").read_text("utf-8").replace("NUMBER", NUMBER)
)

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
    printed = PRINTED | PRINTED[stage]
    found = [
        {
            name: float(value)
            for name, value in zip(printed["names"], match.groups(), strict=True)
            if value
        }
        for match in re.finditer(printed["evaluation"], text)
    ]
    if not found:
        stages = (each for each in STAGES if re.search(PRINTED[each]["evaluation"], text))
        raise InputError(
            f"logs.{name}: {path} is a log of {next(stages, 'another program')}: expected one of"
            f" DeepSpeed-Chat's {stage}"
        )
    record: dict[str, float] = {}
    if rates := re.findall(printed["rows_per_second"], text):
        record["rows_per_second"] = float(rates[-1])
    if latencies := re.findall(printed["seconds_per_step"], text):
        record["seconds_per_step"] = statistics.median(map(float, latencies))
    if peaks := re.findall(printed["peak_gpu_memory_mb"], text):
        record["peak_gpu_memory_mb"] = 1024 * float(peaks[-1])
    if stage == "rlhf":
        return [{"step": step, **values} for step, values in enumerate(found, 1)], {}, record
    # A training that has ended early has no evaluation after it.
    last = found[-1] if len(found) > 1 else {}
    return [], {"before": found[0], **({"after": last} if stage == "sft" else last)}, record
