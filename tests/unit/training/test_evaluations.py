"""Evaluations of a run, and copies of the best model and of models of earlier steps."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest

from snakechat.training.evaluations import Evaluations


@pytest.fixture
def job(tmp_path):
    (tmp_path / "states").mkdir()
    settings = {"eval_steps": 10, "save_strategy": "best", "early_stopping_patience": 2}
    return SimpleNamespace(
        states=tmp_path / "states",
        result=tmp_path / "result",
        settings=SimpleNamespace(**settings, keep_steps=0),
        facts={},
    )


class Model:
    """Stands for a model: a file that contains the step."""

    step = 0
    loss = math.inf

    def save(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model").write_text(f"step {self.step}")

    def evaluate(self):
        return {"loss": self.loss, "accuracy": 0.5}


def evaluations_of(job, **options):
    model = Model()
    return Evaluations(job, 25, model.evaluate, model.save, **options)


@pytest.fixture
def best(job):
    return evaluations_of(job)


def evaluate(best, step, loss):
    model = best.save.__self__
    model.step, model.loss = step, loss
    best.job.settings.eval_steps = 1
    return best.after_step(step)


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
    best = evaluations_of(job, greater_is_better=sign < 0)
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


def test_without_best_no_copies_are_kept(job):
    job.settings.save_strategy, job.settings.early_stopping_patience = "last", 0
    best = evaluations_of(job)
    for step, loss in enumerate(LOSSES, start=1):
        evaluate(best, step, loss)
    assert not copies(job) and not best.should_stop
    best.save_result()
    assert (job.result / "model").read_text() == "step 6"


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


def test_the_first_process_decides_whether_a_model_is_the_best(best, monkeypatch):
    monkeypatch.setattr("snakechat.training.evaluations.broadcast_from_first", lambda _: True)
    evaluate(best, 10, math.nan)
    assert best.best_step == 10


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
    evaluate(best, 20, 2.0)
    assert best.best_step == 20
    assert copies(job) == {"best-10": "step 10", ".copy": "step 20"}
    best.save_result()
    assert not job.result.exists()


def keep(job, steps):
    """Run steps of a training that keeps its model at each second one."""
    job.settings.keep_steps, job.settings.eval_steps, model = 2, 0, Model()
    evaluations = Evaluations(job, 25, model.evaluate, model.save)
    for model.step in steps:
        evaluations.after_step(model.step)
    return evaluations


def test_a_resumed_run_keeps_the_models_of_earlier_steps(job):
    keep(job, range(1, 6))
    assert copies(job) == {f"step-{step}": f"step {step}" for step in (2, 4)}
    half = job.states / ".copy"
    half.mkdir()
    (half / "other").write_text("half of a copy")
    # From a checkpoint of step 3, after the result folder was lost.
    job.settings.save_strategy = "last"
    keep(job, range(4, 7)).save_result()
    found = {path.parent.name: path.read_text() for path in job.result.glob("*/model")}
    assert found == {f"step-{step}": f"step {step}" for step in (2, 4, 6)}
    assert not (job.result / "step-6/other").exists()
