"""Evaluations of a run, and copies of the best model and of models of earlier steps."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest

from snakechat.training.evaluations import Evaluations


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
    states, result = tmp_path / "states", tmp_path / "result"
    states.mkdir()
    return SimpleNamespace(states=states, result=result, settings=settings, facts={})


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


LOSSES = [5.0, 3.0, math.nan, 2.0, 2.0, 2.5]


@pytest.mark.parametrize("sign", [1, -1])
def test_the_lowest_loss_or_the_highest_value_is_the_best(sign, job):
    best = evaluations_of(job, best_metric="loss" if sign < 0 else None)
    # Of a checkpoint before the first evaluation.
    best.load_state_dict(best.state_dict())
    since, stops = [], []
    for step, loss in enumerate(LOSSES, start=1):
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
    # Stopped here; the last checkpoint is that of step 10.
    again = evaluations_of(job)
    again.load_state_dict(state)
    again.save_result()
    assert (job.result / "model").read_text() == "step 10"
    evaluate(again, 20, 2.0)
    assert copies(job) == {"best-10": "step 10", "best-20": "step 20"}
    assert again.state_dict() == best.state_dict()


def test_only_the_first_process_moves_and_copies(best, job, monkeypatch):
    evaluate(best, 10, 3.0)
    monkeypatch.setattr("snakechat.training.evaluations.rank", lambda: 1)
    # The first one decides whether a model is the best.
    monkeypatch.setattr("snakechat.training.evaluations.broadcast_from_first", lambda _: True)
    evaluate(best, 20, math.nan)
    assert best.best_step == 20
    assert copies(job) == {"best-10": "step 10", ".copy": "step 20"}
    best.save_result()
    assert not job.result.exists()


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
    assert not (job.result / "step-6/other").exists()
