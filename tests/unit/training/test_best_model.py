"""The best model of a run: how it is chosen, copied and restored."""

import json
import math
from types import SimpleNamespace

import pytest

from snakechat.training.best_model import BestModel


@pytest.fixture
def job(tmp_path):
    (tmp_path / "states").mkdir()
    return SimpleNamespace(states=tmp_path / "states")


class Model:
    """Stands for a model: a file that contains the step."""

    step = 0

    def save(self, folder):
        folder.mkdir(exist_ok=True)
        (folder / "model").write_text(f"step {self.step}")


@pytest.fixture
def best(job):
    return BestModel(job, Model().save)


def evaluate(best, step, loss):
    if best.save:
        best.save.__self__.step = step
    best.update(step, loss)


def copies(job):
    """Return the content of each copy by the name of its folder."""
    return {path.name: (path / "model").read_text() for path in job.states.iterdir()}


@pytest.mark.parametrize("saves", [True, False])
def test_the_lowest_loss_is_the_best(saves, best, job):
    best = best if saves else BestModel(job, None)
    since = []
    for step, loss in enumerate([5.0, 3.0, 4.0, 2.0, 2.0, 2.5], start=1):
        evaluate(best, step, loss)
        since.append(best.evaluations_since)
    assert (best.step, best.loss) == (4, 2.0)
    assert since == [0, 0, 1, 0, 1, 2]
    assert bool(copies(job)) == saves


def test_a_nan_loss_is_never_the_best(best, job):
    for step, loss in enumerate([2.0, math.nan, 1.0], start=1):
        evaluate(best, step, loss)
        assert best.step == {1: 1, 2: 1, 3: 3}[step]
    assert copies(job) == {"best-3": "step 3"}


def test_copies_to_which_the_last_two_checkpoints_refer_are_kept(best, job):
    evaluate(best, 10, 3.0)
    assert copies(job) == {"best-10": "step 10"}
    best.state_dict()
    evaluate(best, 20, 2.0)
    assert copies(job) == {"best-10": "step 10", "best-20": "step 20"}
    # Not better: nothing changes.
    evaluate(best, 30, 2.5)
    assert copies(job) == {"best-10": "step 10", "best-20": "step 20"}
    # No checkpoint refers to 20.
    evaluate(best, 40, 1.0)
    assert copies(job) == {"best-10": "step 10", "best-40": "step 40"}
    best.state_dict()
    best.state_dict()
    evaluate(best, 50, 0.5)
    assert copies(job) == {"best-40": "step 40", "best-50": "step 50"}


def test_the_best_model_is_copied_next_to_existing_files(best, job, tmp_path):
    for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5)):
        evaluate(best, step, loss)
    result = tmp_path / "result"
    result.mkdir()
    (result / "metrics.jsonl").write_text("metrics")
    best.copy_to(result)
    assert (result / "model").read_text() == "step 20"
    assert (result / "metrics.jsonl").read_text() == "metrics"
    assert copies(job) == {"best-20": "step 20"}


@pytest.mark.parametrize("losses", [[], [3.0], [3.0, 2.0, 2.5]])
def test_state_is_restored(losses, best, job):
    for step, loss in enumerate(losses, start=1):
        evaluate(best, step, loss)
    again = BestModel(job, None)
    again.load_state_dict(json.loads(json.dumps(best.state_dict(), allow_nan=False)))
    assert (again.step, again.loss, again.evaluations_since) == (
        best.step,
        best.loss,
        best.evaluations_since,
    )


def test_a_run_resumed_from_an_earlier_checkpoint_repeats_its_copies(best, job, tmp_path):
    evaluate(best, 10, 3.0)
    state = best.state_dict()
    evaluate(best, 20, 2.0)
    # Stopped here; the last checkpoint is that of step 10.
    again = BestModel(job, Model().save)
    again.load_state_dict(state)
    again.copy_to(tmp_path / "result")
    assert (tmp_path / "result" / "model").read_text() == "step 10"
    evaluate(again, 20, 2.0)
    assert copies(job) == {"best-10": "step 10", "best-20": "step 20"}
    assert again.state_dict() == best.state_dict()


def test_an_incomplete_copy_of_a_killed_run_is_overwritten(best, job):
    (job.states / ".best").mkdir()
    (job.states / ".best" / "model").write_text("half")
    evaluate(best, 10, 3.0)
    assert copies(job) == {"best-10": "step 10"}


def test_only_the_first_process_moves_and_copies(best, job, tmp_path, monkeypatch):
    evaluate(best, 10, 3.0)
    monkeypatch.setattr("snakechat.training.best_model.rank", lambda: 1)
    evaluate(best, 20, 2.0)
    assert best.step == 20
    assert copies(job) == {"best-10": "step 10", ".best": "step 20"}
    best.copy_to(tmp_path / "result")
    assert not (tmp_path / "result").exists()
