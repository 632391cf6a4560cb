"""Metrics of a run: evaluations, copies of the best and of earlier models, logs, times."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from snakechat.training import metrics
from snakechat.training.metrics import Evaluations, MetricsLogger
from snakechat.workflow.errors import InputError


class Model:
    """Stands for a model: a file that contains the step."""

    step, loss = 0, math.inf

    def save(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model").write_text(f"step {self.step}")

    def evaluate(self):
        return {"loss": self.loss, "accuracy": 0.5}


@pytest.fixture
def job(tmp_path):
    settings = {"eval_steps": 1, "save_strategy": "best", "early_stopping_patience": 2}
    settings = SimpleNamespace(**settings, keep_steps=0)
    spec = {"rule": "train_sft", "name": "mine"}
    folders = {name: tmp_path / name for name in ("states", "result", "log_folder")}
    for folder in (folders["states"], folders["result"]):
        folder.mkdir()
    return SimpleNamespace(settings=settings, spec=spec, facts={}, **folders)


def evaluations_of(job, **options):
    model = Model()
    return Evaluations(job, 25, model.evaluate, model.save, **options)


@pytest.fixture
def best(job):
    return evaluations_of(job)


def evaluate(best, step, loss):
    model = best.save.__self__
    model.step, model.loss = step, loss
    best.after_step(step)


def copies(job):
    """Return the content of each copy by the name of its folder."""
    folders = (path for path in job.states.iterdir() if not path.name.isdigit())
    return {path.name: (path / "model").read_text() for path in folders}


def save(best, job, step):
    """Save the checkpoint of a step."""
    folder = job.states / f"{step:08}/0-of-1"
    folder.mkdir(parents=True)
    values = {f"evaluations.{name}": value for name, value in best.state_dict().items()}
    (folder / "values.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("interval", "due"), [(0, []), (1, list(range(26))), (10, [0, 10, 20, 25]), (40, [0, 25])]
)
def test_a_model_is_evaluated_at_intervals_and_after_the_last_step(interval, due, job):
    job.settings.eval_steps = interval
    best = evaluations_of(job)
    assert [step for step in range(26) if best.is_due(step)] == due


@pytest.mark.parametrize("sign", [1, -1])
def test_the_lowest_loss_or_the_highest_value_is_the_best(sign, job):
    best = evaluations_of(job, best_metric="loss" if sign < 0 else None)
    # Of a checkpoint before the first evaluation.
    best.load_state_dict(best.state_dict())
    since, stops = [], []
    for step, loss in enumerate([5.0, 3.0, math.nan, 2.0, 2.0, 2.5], start=1):
        evaluate(best, step, sign * loss)
        since.append(best.since_best)
        stops.append(best.should_stop)
    assert (best.best_step, best.best_value) == (4, sign * 2.0)
    # The patience is 2.
    assert since == [0, 0, 1, 0, 1, 2] and stops == [False] * 5 + [True]
    assert "best-4" in copies(job)


def test_copies_to_which_a_checkpoint_refers_are_kept(best, job):
    evaluate(best, 10, 3.0)
    save(best, job, 10)
    evaluate(best, 20, 2.0)
    # Not better: nothing changes.
    evaluate(best, 30, 2.5)
    assert copies(job) == {"best-10": "step 10", "best-20": "step 20"}
    # The state after step 39, which refers to 20, may be saved while the model is evaluated.
    evaluate(best, 40, 1.0)
    assert copies(job).keys() == {"best-10", "best-20", "best-40"}
    evaluate(best, 45, 0.9)
    assert copies(job).keys() == {"best-10", "best-40", "best-45"}
    save(best, job, 45)
    shutil.rmtree(job.states / f"{10:08}")
    evaluate(best, 50, 0.5)
    assert copies(job) == {"best-45": "step 45", "best-50": "step 50"}


def test_a_run_resumed_from_an_earlier_checkpoint_repeats_its_copies(best, job):
    evaluate(best, 10, 3.0)
    state = best.state_dict()
    evaluate(best, 20, 2.0)
    # Stopped here; step 10 wrote the last checkpoint.
    again = evaluations_of(job)
    again.load_state_dict(state)
    again.save_result()
    assert (job.result / "model").read_text() == "step 10"
    evaluate(again, 20, 2.0)
    assert copies(job) == {"best-10": "step 10", "best-20": "step 20"}
    assert again.state_dict() == best.state_dict()


def test_only_the_first_process_moves_and_copies(best, job, monkeypatch):
    evaluate(best, 10, 3.0)
    monkeypatch.setattr(metrics, "rank", lambda: 1)
    # The first one decides whether a model is the best.
    monkeypatch.setattr(metrics, "broadcast_from_first", lambda _: True)
    waited = []
    monkeypatch.setattr(metrics, "barrier", lambda: waited.append(best.best_step))
    evaluate(best, 20, math.nan)
    # For the copy of the first one.
    assert waited == [10] and best.best_step == 20
    assert copies(job) == {"best-10": "step 10", ".copy": "step 20"}
    best.save_result()
    assert not any(job.result.iterdir())


def keep(job, steps):
    """Run steps of a training that keeps its model at each second one."""
    job.settings.keep_steps, job.settings.eval_steps = 2, 0
    job.settings.save_strategy, evaluations = "last", evaluations_of(job)
    for step in steps:
        evaluate(evaluations, step, math.nan)
    return evaluations


def test_a_resumed_run_keeps_the_models_of_earlier_steps(job):
    keep(job, range(1, 6))
    assert copies(job) == {f"step-{step}": f"step {step}" for step in (2, 4)}
    half = job.states / ".copy"
    half.mkdir()
    (half / "other").write_text("half of a copy")
    # From a checkpoint of step 3, after the result folder was lost.
    keep(job, range(4, 7)).save_result()
    found = {path.parent.name: path.read_text() for path in job.result.glob("**/model")}
    steps = {f"step-{step}": f"step {step}" for step in (2, 4, 6)}
    assert found == {"result": "step 6", **steps}
    assert not list(job.result.glob("**/other"))


def scalars(job, name):
    board = EventAccumulator(str(job.log_folder / "tensorboard"))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(name)]


def test_a_resumed_run_appends_lines_and_has_each_scalar_once(job):
    with MetricsLogger(job, 5) as logger:
        for step in range(1, 5):
            logger.log(step, {"loss": step / 8})
    # The fourth step was logged, but the third wrote the checkpoint. Existing lines are kept as
    # they are, with other spaces, too.
    before = b'{"step": 1, "loss": 0.125}\n{"loss":0.25, "step":2}\n{"step": 3, "loss": 3.75e-1}\n'
    (job.result / "metrics.jsonl").write_bytes(before)
    with MetricsLogger(job, 5) as logger:
        logger.log(4, {"loss": 4.0, "none": None})
        logger.log(5, {"loss": 5.0})
        message = r"step 6, rows \[3, 7\]: loss is inf, training has diverged: try a lower"
        with pytest.raises(InputError, match=message):
            logger.log(6, {"loss": math.inf}, rows=[3, 7])
    assert (job.result / "metrics.jsonl").read_bytes() == (
        before + b'{"step": 4, "loss": 4.0}\n{"step": 5, "loss": 5.0}\n'
    )
    assert scalars(job, "loss") == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 4.0), (5, 5.0)]


def test_times_are_written_to_the_log_folder_and_not_into_the_result(job):
    with MetricsLogger(job, 2) as logger:
        for step in (1, 2):
            logger.log_step(step, {"generate": 3.0, "train": 2.0}, 100 * step)
    # 100 and 200 tokens in 5 seconds.
    lines = map(json.loads, (job.log_folder / "times.jsonl").read_text().splitlines())
    assert list(lines) == [
        {"step": step, "generate": 3, "train": 2, "tokens": 100 * step, "tokens_per_second": rate}
        for step, rate in ((1, 20), (2, 40))
    ]
    assert scalars(job, "times/tokens_per_second") == [(1, 20.0), (2, 40.0)]
    assert [path.name for path in job.result.iterdir()] == ["metrics.jsonl"]
