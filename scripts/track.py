"""Send the metrics of a training to experiment trackers, while it runs or later.

    python scripts/track.py output/rlhf/mine --to mlflow
    python scripts/track.py output/rlhf/mine --to wandb swanlab --follow

A tracker gets the settings of the training, the metrics and times of each step, and the figures of
the evaluation, if there is one. What was sent is noted in output/logs: the same command sends only
what is new, to the same run. A training of other settings is another run.

--follow sends the metrics of a running training until it has finished. `trackers` in config.yaml
starts this with each training.

The libraries are optional (pip install wandb), and read their own environment variables, such as
WANDB_MODE=offline or MLFLOW_TRACKING_URI.
"""

import argparse
import json
import secrets
import sys
import time
from pathlib import Path
from typing import Any

from snakechat.reporting.trackers import (
    TRACKERS,
    TrackedRun,
    Tracker,
    open_tracker,
    tracker_error,
)
from snakechat.reporting.training_log import TrainingLog
from snakechat.workflow.digests import digest, write_atomically
from snakechat.workflow.errors import InputError
from snakechat.workflow.job_states import growing_folder, is_alive

# Seconds between two looks at a running training.
INTERVAL = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="output/STAGE/RECIPE")
    parser.add_argument("--to", nargs="+", choices=TRACKERS, required=True, metavar="TRACKER")
    parser.add_argument("--project", default="snakechat", help="default: snakechat")
    parser.add_argument("--follow", action="store_true", help="until the training has finished")
    # Of the training that the launcher starts: its end is the end of the run.
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    failed = False
    try:
        while arguments.process and not (
            growing_folder(arguments.result).exists() or not is_alive(arguments.process)
        ):
            time.sleep(1)
        log = TrainingLog(arguments.result)
        channels = []
        for name in arguments.to:
            # A tracker that fails does not cost the others theirs.
            try:
                channels.append(Channel(name, log, arguments.project))
            except InputError as error:
                failed = True
                print(f"error: {error}", file=sys.stderr)
        while channels:
            ended = not arguments.follow or (
                not is_alive(arguments.process) if arguments.process else log.is_finished
            )
            for channel in list(channels):
                try:
                    channel.send(is_finished=ended)
                except InputError as error:
                    failed = True
                    channels.remove(channel)
                    print(f"error: {error}", file=sys.stderr)
            if ended:
                break
            time.sleep(INTERVAL)
        for channel in channels:
            channel.finish()
            print(f"{channel.name}: run {channel.run.name} up to step {channel.step}")
    except InputError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(failed)


class Channel:
    """A training and one of its trackers.

    Attributes:
        step: The last step that was sent.
    """

    def __init__(self, name: str, log: TrainingLog, project: str) -> None:
        self.name, self.log = name, log
        self.path = log.root / "logs" / log.rule / log.recipe / "trackers.json"
        spec = digest(log.spec)
        state = read_state(self.path).get(name, {})
        if (state.get("spec"), state.get("project")) != (spec, project):
            state = {"spec": spec, "project": project, "run": secrets.token_hex(6), "step": -1}
        self.state: dict[str, Any] = state
        self.run = TrackedRun(project, f"{log.stage}/{log.recipe}", state["run"], log.settings())
        self.tracker: Tracker = open_tracker(name, self.run)

    @property
    def step(self) -> int:
        step: int = self.state["step"]
        return step

    def send(self, is_finished: bool) -> None:
        """Send what is new. Raises InputError if the tracker fails."""
        try:
            for step, metrics in self.log.read(self.step, is_finished):
                self.tracker.log(step, metrics)
                self.state["step"] = step
            figures = self.log.evaluation() if is_finished else {}
            if figures and digest(figures) != self.state.get("evaluation"):
                self.tracker.log(self.step, figures)
                self.state["evaluation"] = digest(figures)
        except Exception as error:
            raise tracker_error(self.name, error) from None
        self._save()

    def finish(self) -> None:
        """Wait until everything was sent. Raises InputError if the tracker fails."""
        try:
            self.tracker.finish()
        except Exception as error:
            raise tracker_error(self.name, error) from None

    def _save(self) -> None:
        states = read_state(self.path) | {self.name: self.state}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(states, indent=1, sort_keys=True) + "\n")


def read_state(path: Path) -> dict[str, Any]:
    """Return what was sent to each tracker."""
    if not path.exists():
        return {}
    states: dict[str, Any] = json.loads(path.read_text())
    return states


if __name__ == "__main__":
    main()
