"""A finished training as its record describes it: settings, run, steps, data and evaluation."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from snakechat.planning.flops import rlhf_flops, training_flops
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job
from snakechat.workflow.run_record import read_run_record, run_record_path


class TrainingSummary:
    """A training and what was measured of it.

    Attributes:
        stage: sft, reward, dpo or rlhf.
        name: Name of the recipe.
        settings: Settings of the training.
        run: NAME.run.json of the training.
        steps: The lines of metrics.jsonl.
        metrics: metrics.json of the evaluation.
        data: stats.json of the tokens.
    """

    def __init__(self, job: Job[Any]) -> None:
        folder = job.inputs["training"]
        entry = job.lineage[str(folder)]
        self.stage: str = folder.parts[1]
        self.name: str = entry["name"]
        self.settings: dict[str, Any] = entry["settings"]
        self.run = read_run(folder, entry["spec"])
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        self.steps: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.metrics: dict[str, Any] = read_json(job.inputs["evaluation"] / "metrics.json")
        self.data: dict[str, Any] = read_json(job.inputs["tokens"] / "stats.json")

    @property
    def models(self) -> dict[str, dict[str, int]]:
        """Sizes of the trained models, by name."""
        return self.run["models"]

    @property
    def num_processes(self) -> int:
        """Number of processes of the training."""
        placement = self.run["placement"]
        return placement["nodes"] * max(placement["gpus_per_node"], 1)

    @property
    def batch_size(self) -> int:
        """Rows per step (RLHF: prompts per rollout)."""
        return self.settings["rollout_batch_size" if self.stage == "rlhf" else "global_batch_size"]

    @property
    def steps_per_epoch(self) -> int:
        """Steps that all training rows take."""
        return -(-self.data["train"]["rows"] // self.batch_size)

    @property
    def planned_steps(self) -> int:
        """Steps of the whole run, unless it stops early."""
        steps = self.steps_per_epoch * self.settings["epochs"]
        return min(steps, self.settings["max_steps"] or steps)

    @cached_property
    def mean_lengths(self) -> dict[str, float]:
        """Mean tokens of the prompt and of each kind of response of a row."""
        train = self.data["train"]
        lengths = {name: tokens["sum"] / train["rows"] for name, tokens in train["tokens"].items()}
        if self.stage == "rlhf":
            responses = [line["response/length"] for line in self.steps]
            lengths["response"] = sum(responses) / len(responses)
        return lengths

    @property
    def tokens_per_row(self) -> float:
        """Mean tokens of a row without padding, with one prompt for all its responses."""
        lengths = dict(self.mean_lengths)
        if self.stage == "rlhf":
            lengths["response"] *= self.settings["num_generations"]
        return sum(lengths.values())

    @property
    def flops_per_token(self) -> float:
        """Floating point operations per trained token."""
        lengths = dict(self.mean_lengths)
        prompt = lengths.pop("prompt")
        # The responses of a row do not attend to each other.
        length = prompt + sum(lengths.values()) / len(lengths)
        if self.stage == "rlhf":
            return rlhf_flops(self.models, length, self.settings["ppo_epochs"])
        return training_flops(self.models["model"], length)

    @property
    def rows_per_second(self) -> float:
        """Rows (RLHF: prompts) per second of the median step."""
        rows = min(self.batch_size, self.data["train"]["rows"])
        return rows / self.run["seconds_per_step"]

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that overflowed in fp16: their lines have no gradient norm."""
        return sum(line["step"] > 0 and "grad_norm" not in line for line in self.steps)


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text())


def read_run(folder: Path, spec: str) -> dict[str, Any]:
    """Read NAME.run.json of a result.

    Raises:
        InputError: The file cannot be read, or belongs to another run than the one that made the
            result.
    """
    path, run = run_record_path(folder), read_run_record(folder)
    if run is None:
        raise InputError(
            f"{path} cannot be read: it contains the measurements of {folder}; train it again"
        )
    if run["spec"] != spec:
        raise InputError(
            f"{path} belongs to another run than the one that made {folder}: train it again"
        )
    return run
