"""The metrics of a training, read while it writes them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from snakechat.workflow.errors import InputError
from snakechat.workflow.job_states import growing_folder
from snakechat.workflow.manifest import input_digest, manifest_path
from snakechat.workflow.valid_manifests import read_valid_manifest

# The metrics of a step, by name.
StepMetrics = tuple[int, dict[str, float]]


class TrainingLog:
    """The metrics of a training that runs, or has finished.

    Args:
        result: Folder of the result: output/STAGE/RECIPE.

    Attributes:
        stage, recipe: As in the path of the result.
        spec: The spec of the training.

    Raises:
        InputError: The path is not that of a training that has started.
    """

    def __init__(self, result: Path) -> None:
        self.result, self.stage, self.recipe = result, result.parent.name, result.name
        self.growing = growing_folder(result)
        self.rule = f"train_{self.stage}"
        # Relative to output/.
        self.root = result.parent.parent
        self.spec = self._read_spec()

    @property
    def is_finished(self) -> bool:
        """Whether no training is running that replaces the result."""
        return manifest_path(self.result).exists() and not self.growing.exists()

    def read(self, after: int = -1, is_finished: bool = True) -> Iterator[StepMetrics]:
        """Yield the metrics of the steps after a step, with its times as times/NAME.

        is_finished: False keeps back the newest step, whose line may lack its times.
        """
        folder = self.growing if self.growing.exists() else self.result
        metrics = read_steps(folder / "metrics.jsonl")
        times = read_steps(self.root / "logs" / self.rule / self.recipe / "times.jsonl")
        steps = sorted(step for step in metrics if step > after)
        for step in steps if is_finished else steps[:-1]:
            seconds = {f"times/{name}": value for name, value in times.get(step, {}).items()}
            yield step, {**metrics[step], **seconds}

    def evaluation(self) -> dict[str, float]:
        """Return the figures of the result's evaluation as evaluation/NAME; {} without one."""
        folder = self.root / "eval" / self.stage / self.recipe
        trained = read_valid_manifest(manifest_path(self.result))
        evaluated = read_valid_manifest(manifest_path(folder))
        if trained is None or evaluated is None:
            return {}
        # Not that of an earlier result.
        if input_digest(evaluated["spec"], trained) not in evaluated["inputs"].values():
            return {}
        flat = flatten(json.loads((folder / "metrics.json").read_text()), "evaluation", "/")
        return {name: value for name, value in flat.items() if is_number(value)}

    def settings(self) -> dict[str, Any]:
        """Return the settings of the training by their keys, with dots."""
        return flatten(self.spec["settings"])

    def _read_spec(self) -> dict[str, Any]:
        specs = (self.root / "specs" / self.rule).glob(f"{self.recipe}-*.json")
        if self.growing.exists() and (newest := max(specs, key=written, default=None)):
            spec: dict[str, Any] = json.loads(newest.read_text())
            return spec
        manifest = read_valid_manifest(manifest_path(self.result))
        if manifest is None or manifest["spec"]["rule"] != self.rule:
            raise InputError(
                f"{self.result} is no training that has started: give output/STAGE/RECIPE, for"
                " example output/sft/tiny"
            )
        spec = manifest["spec"]
        return spec


def read_steps(path: Path) -> dict[int, dict[str, float]]:
    """Return the lines of a file of JSON lines by their step, without one that is incomplete."""
    if not path.exists():
        return {}
    lines = path.read_text().split("\n")[:-1]
    values = [json.loads(line) for line in lines]
    return {line.pop("step"): line for line in values}


def flatten(values: Mapping[str, Any], prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Return nested mappings as one, whose keys are joined by a separator."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{separator}{key}" if prefix else key
        flat |= flatten(value, name, separator) if isinstance(value, Mapping) else {name: value}
    return flat


def is_number(value: object) -> bool:
    """Return whether a value of JSON is a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def written(path: Path) -> float:
    """Return when a file was written."""
    return path.stat().st_mtime
