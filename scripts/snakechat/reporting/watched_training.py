"""A training as it is now, from the files that it writes: its steps, responses, log and jobs."""

import json
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.reporting.labels import CURVES
from snakechat.workflow.errors import InputError
from snakechat.workflow.job_states import (
    Holder,
    JobState,
    State,
    growing_folder,
    job_states,
    lock_holder,
    modified,
    read_tail,
)
from snakechat.workflow.machine_usage import GpuUsage, ProcessUsage, gpu_usage, process_usage


class View(NamedTuple):
    """A training at one moment.

    Attributes:
        name: STAGE/RECIPE.
        job: The training among the jobs; None before a build has planned it.
        jobs: The training, its upstream jobs, its evaluation and its report.
        steps: Metrics of the steps, as in metrics.jsonl.
        responses: The responses that were logged last, as in responses.jsonl.
        total: Number of steps of the whole training; None if unknown.
        left: Time left as the progress bar shows it; "" if unknown.
        age: Seconds since the last step; None without any.
        throughput: Tokens per second in the last step; None if unknown.
        build: The process of Snakemake that has locked the folder last.
        gpus, process: What is in use.
    """

    name: str
    job: JobState | None
    jobs: list[JobState]
    steps: list[dict[str, Any]]
    responses: list[dict[str, Any]]
    total: int | None
    left: str
    age: float | None
    throughput: float | None
    build: Holder | None
    gpus: list[GpuUsage]
    process: ProcessUsage | None

    @property
    def state(self) -> State:
        """What the training is doing."""
        return self.job.state if self.job else "waits"

    @property
    def has_ended(self) -> bool:
        """Whether the training has ended, and no build continues with later jobs."""
        builds = self.build is not None and self.build.is_alive is True
        return self.state in ("finished", "failed") and not builds


class WatchedTraining:
    """A training that may not have begun.

    Args:
        result: Folder of the result: output/STAGE/RECIPE.

    Raises:
        InputError: The path is not that of a training, or there is no build at that place.
    """

    def __init__(self, result: Path) -> None:
        self.result = result
        self.stage, self.recipe, self.root = result.parent.name, result.name, result.parent.parent
        if self.stage not in CURVES or not self.root.name:
            raise InputError(
                f"{result} is no training: give output/STAGE/RECIPE, for example output/sft/tiny"
            )
        is_first_build = self.root.name == "output" and (self.root.parent / "Snakefile").exists()
        if not self.root.exists() and not is_first_build:
            raise InputError(
                f"{self.root} does not exist: start this program in the folder of the build, or"
                f" give the whole path of output/{self.stage}/{self.recipe}"
            )
        self._steps, self._responses, self._times = (GrowingLines() for _ in range(3))

    def look(self) -> View:
        """Return the training as it is now."""
        growing = growing_folder(self.result)
        folder = growing if growing.exists() else self.result
        name, rule, metrics = (
            f"{self.stage}/{self.recipe}",
            f"train_{self.stage}",
            folder / "metrics.jsonl",
        )
        wanted = [
            (rule, self.recipe, f"output/{name}"),
            (f"evaluate_{self.stage}", self.recipe, f"output/eval/{name}"),
            ("draw_report", name, f"output/report/{name}"),
        ]
        jobs = job_states(self.root, wanted)
        job = next((job for job in jobs if (job.rule, job.name) == (rule, self.recipe)), None)
        steps = self._steps.read(metrics)
        times = self._times.read(self.root / "logs" / rule / self.recipe / "times.jsonl")
        responses = self._responses.read(folder / "responses.jsonl")
        total, left = self._progress(rule)
        process = job.holder.process if job and job.holder and job.holder.is_alive else None
        return View(
            name=name,
            job=job,
            jobs=jobs,
            steps=steps,
            responses=[line for line in responses if line["step"] == responses[-1]["step"]],
            total=total,
            left=left,
            age=time.time() - modified(metrics) if steps else None,
            throughput=times[-1].get("tokens_per_second") if times else None,
            build=lock_holder(self.root / ".lock"),
            gpus=gpu_usage(),
            process=process_usage(process) if process else None,
        )

    def _progress(self, rule: str) -> tuple[int | None, str]:
        """Return the number of steps and the time left, from the progress bar in the log."""
        log = read_tail(self.root / "logs" / rule / f"{self.recipe}.log")
        bars = re.findall(rf"{rule}: [^\r\n]*?\d+/(\d+) \[[\d:]+<([\d:]*)", log)
        return (int(bars[-1][0]), bars[-1][1]) if bars else (None, "")


class GrowingLines:
    """The lines with a step of a file of JSON lines that grows, of which only new ones are read."""

    def __init__(self) -> None:
        self._place: tuple[Path, int] | None = None
        self._end = 0
        self._lines: list[dict[str, Any]] = []

    def read(self, path: Path) -> list[dict[str, Any]]:
        """Return all lines that are complete; [] if there is no file."""
        try:
            with path.open("rb") as file:
                status = path.stat()
                if self._place != (path, status.st_ino) or status.st_size < self._end:
                    # Another run, or the result of this one.
                    self._place, self._end, self._lines = (path, status.st_ino), 0, []
                file.seek(self._end)
                new = file.read()
        except OSError:
            return []
        # A line that is being written is read the next time.
        complete = new[: new.rfind(b"\n") + 1]
        self._end += len(complete)
        self._lines += filter(None, map(_parse, complete.splitlines()))
        return self._lines


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None for a damaged one, which a crash of the machine leaves."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("step"), int) else None
