"""scripts/track.py sends the metrics of trainings to experiment trackers."""

import json
import sqlite3
import struct
import sys
import time

import pytest

from conftest import ROOT

# With the libraries of tests/requirements-trackers.txt.
PYTHON = ROOT / ".venv-trackers/bin/python"
RESULT = "output/sft/tiny"
# Prints the history of a metric of the only run: [[step, value], ...].
MLFLOW_HISTORY = """
import json, mlflow
client = mlflow.MlflowClient()
[run] = client.search_runs([client.get_experiment_by_name("snakechat").experiment_id])
assert run.data.params["epochs"] and run.info.run_name == "sft/tiny"
history = client.get_metric_history(run.info.run_id, "loss")
print(json.dumps([[metric.step, metric.value] for metric in history]))
"""


def track(workflow, *options):
    """Run scripts/track.py on the SFT model of a workflow."""
    return workflow.run(str(PYTHON), "scripts/track.py", RESULT, *options)


def losses(workflow):
    """Return [[step, loss], ...] of the training."""
    lines = (workflow.folder / RESULT / "metrics.jsonl").read_text().splitlines()
    return [[line["step"], line["loss"]] for line in map(json.loads, lines) if "loss" in line]


def read_mlflow(workflow, folder):
    process = workflow.run(str(PYTHON), "-c", MLFLOW_HISTORY)
    return json.loads(process.stdout.strip().splitlines()[-1])


def read_trackio(workflow, folder):
    (path,) = folder.glob("trackio/*.db")
    rows = sqlite3.connect(path).execute("SELECT step, metrics FROM metrics ORDER BY step")
    history = [[step, json.loads(metrics)] for step, metrics in rows]
    return [[step, metrics["loss"]] for step, metrics in history if "loss" in metrics]


def read_wandb(workflow, folder):
    """Return the losses that are in the file of an offline run, which has numbers as text."""
    (path,) = workflow.folder.glob("wandb/offline-run-*/*.wandb")
    content = path.read_bytes()
    assert b"sft/tiny" in content and b"evaluation/after/perplexity" in content
    return [[step, loss] for step, loss in losses(workflow) if repr(loss).encode() in content]


def read_swanlab(workflow, folder):
    """Return the losses that are in the file of an offline run, which has numbers as doubles."""
    (path,) = workflow.folder.glob("swanlog/run-*/*.swanlab")
    content = path.read_bytes()
    assert b"evaluation/after/perplexity" in content
    return [[step, loss] for step, loss in losses(workflow) if struct.pack("<d", loss) in content]


READERS = {
    "mlflow": read_mlflow,
    "trackio": read_trackio,
    "wandb": read_wandb,
    "swanlab": read_swanlab,
}


@pytest.fixture
def copy(quick, tmp_path):
    """A copy of the quick build, whose trackers are local."""
    copy = quick.copy(tmp_path / "copy")
    copy.environment.update(
        MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/mlflow.db",
        TRACKIO_DIR=str(tmp_path / "trackio"),
        WANDB_MODE="offline",
        SWANLAB_MODE="offline",
    )
    return copy


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs make .venv-trackers/ready")
@pytest.mark.parametrize("tracker", READERS)
def test_a_tracker_has_the_metrics_of_a_finished_training(tracker, copy, tmp_path):
    process = track(copy, "--to", tracker)
    assert process.returncode == 0, process.stdout
    assert READERS[tracker](copy, tmp_path) == losses(copy)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs make .venv-trackers/ready")
def test_a_second_run_sends_only_what_is_new(copy, tmp_path):
    metrics = copy.folder / RESULT / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text("".join(text.splitlines(keepends=True)[:-1]))
    assert track(copy, "--to", "trackio").returncode == 0
    metrics.write_text(text)
    assert track(copy, "--to", "trackio").returncode == 0
    assert read_trackio(copy, tmp_path) == losses(copy)


def test_a_missing_library_and_a_missing_training_are_one_line(copy):
    program = (sys.executable, "scripts/track.py")
    process = copy.run(*program, RESULT, "--to", "swanlab")
    assert process.returncode == 1
    assert process.stdout.startswith("error: swanlab is not installed")
    process = copy.run(*program, "output/sft/none", "--to", "swanlab")
    assert process.returncode == 1
    assert process.stdout.startswith("error: output/sft/none is no training")
    assert process.stdout.count("\n") == 1


# A tracker that writes what it gets into a file, and fails at its end.
STUB = """
import json

class Run:
    def log(self, metrics, step):
        with open("tracked.jsonl", "a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\\n")

    def finish(self):
        raise OSError("no network")

def init(**options):
    return Run()
"""


@pytest.mark.slow
def test_trackers_follow_a_training_which_does_not_depend_on_them(copy, tmp_path):
    (tmp_path / "stubs").mkdir()
    (tmp_path / "stubs/trackio.py").write_text(STUB)
    copy.environment["PYTHONPATH"] = str(tmp_path / "stubs")
    (copy.folder / "more.json").write_text(
        json.dumps({"trackers": ["trackio", "swanlab"], "sft": {"defaults": {"seed": 77}}})
    )
    copy.options += ("more.json",)
    process = copy.snakemake(f"{RESULT}.manifest.json", "--cores", "1")
    assert process.returncode == 0, process.stdout
    assert "warning: trackers: swanlab is not installed" in process.stdout
    tracked, log = copy.folder / "tracked.jsonl", "output/logs/train_sft/tiny/trackers.log"
    expected = losses(copy)
    deadline = time.monotonic() + 60
    while "no network" not in (copy.folder / log).read_text() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert "error: trackio: OSError: no network" in (copy.folder / log).read_text()
    lines = [json.loads(line) for line in tracked.read_text().splitlines()]
    assert [[line["step"], line["loss"]] for line in lines] == expected
    assert all("times/train" in line for line in lines)
