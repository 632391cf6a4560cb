"""Run a benchmark: a command of a user that measures a model. Writes metrics.json.

The result has the files of the command in the folder output.
"""

import json
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np

from snakechat.evaluation.comparisons import NORMAL_QUANTILE, mean_with_interval
from snakechat.workflow.commands import run_command
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job, run, write_json


def main(job: Job[Any]) -> None:
    """Run the command, and read the metrics from its files.

    metrics.json has each metric by name, the 95 % intervals of those with a standard error or with
    results by item, and these results. Raises InputError as run_command and read_metric do.
    """
    output = job.result / "output"
    output.mkdir()
    run_command(job, output)
    metrics: dict[str, Any] = {"intervals_95": {}, "items": {}}
    for name, (pattern, *keys) in job.settings.metrics.items():
        try:
            metrics[name], *found = read_metric(output, pattern, keys)
        except InputError as error:
            raise InputError(f"{job.target}: metrics.{name}: {error}") from None
        metrics["intervals_95"][name], metrics["items"][name] = found
        print(f"{name} {metrics[name]:.4g}")
    write_json(job.result / "metrics.json", metrics)


def read_metric(
    folder: Path, pattern: str, keys: Sequence[str | int]
) -> tuple[float, list[float] | None, list[float]]:
    """Return a metric, its interval and its results by item.

    Raises InputError if the file or the keys do not lead to them.

    folder: The files of the command.
    pattern: A glob that matches one file, of JSON or of JSON lines.
    keys: They lead to a number or to a list of numbers; in each of several lines, to a number.
    """
    files = [path for path in sorted(folder.glob(pattern)) if path.is_file()]
    if len(files) != 1:
        names = ", ".join(path.relative_to(folder).as_posix() for path in files) or "none"
        raise InputError(f"{pattern} matches {len(files)} files in {{output}}, expected 1: {names}")
    [path] = files
    try:
        text, is_one = path.read_text(encoding="utf-8"), path.suffix != ".jsonl"
        lines = [text] if is_one else filter(str.strip, text.split("\n"))
        contents = [json.loads(line) for line in lines]
        values = [reduce(getitem, keys, content) for content in contents]
    except ValueError as error:
        raise InputError(f"{path.name} is not JSON: {error}") from None
    except (LookupError, TypeError):
        raise InputError(f"{path.name} has no {'.'.join(map(str, keys))}") from None
    found: Any = values[0] if is_one else values
    values = found if isinstance(found, list) else [found]
    if not values or not all(map(is_number, values)):
        raise InputError(f"{path.name}: expected a number, found {repr(found)[:80]}")
    if isinstance(found, list):
        value, interval = mean_with_interval(np.array(values, float), np.arange(len(values)))
        return value, interval, [float(value) for value in values]
    # lm-evaluation-harness names the standard error of "acc,none" "acc_stderr,none".
    *before, last = keys or [""]
    with suppress(LookupError, TypeError, OverflowError):
        name = re.sub("(?=,|$)", "_stderr", str(last), count=1)
        half = NORMAL_QUANTILE * reduce(getitem, [*before, name], contents[0])
        if is_number(half) and half:
            return float(found), [found - half, found + half], []
    return float(found), None, []


def is_number(value: Any) -> bool:
    """Return whether a value of JSON is a finite number that a float can hold."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


if __name__ == "__main__":
    run(main)
