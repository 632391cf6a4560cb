"""Experiment trackers: each receives a run's settings, and its metrics step by step.

Their libraries are optional, and imported when a tracker is opened. Addresses, keys and offline
modes are those of each library: WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_DIR, SWANLAB_MODE.
"""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from snakechat.workflow.errors import InputError

# Tag of an MLflow run with TrackedRun.id: MLflow chooses the ids of runs.
ID_TAG = "snakechat.run"


class TrackedRun(NamedTuple):
    """What a tracker shows of a run before its first metrics.

    Attributes:
        project: Project of the tracker, or experiment.
        name: STAGE/RECIPE.
        id: Identifies the run. A tracker that has a run of this id continues it.
        settings: By the names of their keys, with dots.
    """

    project: str
    name: str
    id: str
    settings: Mapping[str, Any]


class Tracker(Protocol):
    """An open run of a tracker."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send metrics of a step. Steps never decrease."""

    def finish(self) -> None:
        """End the run, after everything was sent."""


class Wandb:
    """Weights & Biases."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = self.library().init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            config=dict(run.settings),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def finish(self) -> None:
        self.run.finish()

    @staticmethod
    def library() -> Any:
        import wandb

        return wandb


class Swanlab(Wandb):
    """SwanLab, whose interface is that of Weights & Biases."""

    @staticmethod
    def library() -> Any:
        import swanlab

        return swanlab


class Mlflow:
    """MLflow."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow

        self.client, self.entities = mlflow.MlflowClient(), mlflow.entities
        experiment = mlflow.set_experiment(run.project).experiment_id
        found = self.client.search_runs([experiment], f"tags.`{ID_TAG}` = '{run.id}'")
        if found:
            self.id = found[0].info.run_id
            self.client.update_run(self.id, "RUNNING")
            return
        created = self.client.create_run(experiment, run_name=run.name, tags={ID_TAG: run.id})
        self.id = created.info.run_id
        params = [self.entities.Param(key, str(value)) for key, value in run.settings.items()]
        self.client.log_batch(self.id, params=params)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = round(time.time() * 1000)
        batch = [self.entities.Metric(name, value, now, step) for name, value in metrics.items()]
        self.client.log_batch(self.id, metrics=batch)

    def finish(self) -> None:
        self.client.set_terminated(self.id)


class Trackio(Wandb):
    """Trackio, whose runs have no id but their name."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self.run = trackio.init(
            project=run.project,
            name=f"{run.name} {run.id}",
            resume="allow",
            config=dict(run.settings),
            embed=False,
        )


# By the name of the library.
TRACKERS: dict[str, type[Wandb | Mlflow]] = {
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
    "swanlab": Swanlab,
}


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """Return the run of a tracker: a new one, or the one that has this id.

    Raises:
        InputError: The library is not installed, or failed.
    """
    try:
        tracker: Tracker = TRACKERS[name](run)
    except ImportError as error:
        raise InputError(f"{name} is not installed ({error}): pip install {name}") from None
    # What a library of another project raises is not known here.
    except Exception as error:
        raise tracker_error(name, error) from None
    return tracker


def tracker_error(name: str, error: Exception) -> InputError:
    """Return the error of a tracker that failed."""
    return InputError(f"{name}: {type(error).__name__}: {error}")
