"""The best model of a run: which one it is, which folders there are, how it comes back."""

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
    """Stands for a model: a file that has the step in it."""

    step = 0

    def save(self, folder):
        folder.mkdir(exist_ok=True)
        (folder / "model").write_text(f"step {self.step}")


@pytest.fixture
def best(job):
    return BestModel(job, Model().save)


def offer(best, step, loss):
    if best.save:
        best.save.__self__.step = step
    best.update(step, loss)


def kept(job):
    """The models there are: {folder: what was saved}."""
    return {path.name: (path / "model").read_text() for path in job.states.iterdir()}


@pytest.mark.parametrize("keeps", [True, False])
def test_the_lowest_loss_is_the_best(keeps, best, job):
    best = best if keeps else BestModel(job, None)
    since = []
    for step, loss in enumerate([5.0, 3.0, 4.0, 2.0, 2.0, 2.5], start=1):
        offer(best, step, loss)
        since.append(best.evaluations_since)
    assert (best.step, best.loss) == (4, 2.0)
    assert since == [0, 0, 1, 0, 1, 2]
    assert bool(kept(job)) == keeps


def test_a_loss_that_is_no_number_is_never_the_best(best, job):
    for step, loss in enumerate([2.0, math.nan, 1.0], start=1):
        offer(best, step, loss)
        assert best.step == {1: 1, 2: 1, 3: 3}[step]
    assert kept(job) == {"best-3": "step 3"}


def test_the_best_models_that_the_last_two_states_tell_of_are_kept(best, job):
    offer(best, 10, 3.0)
    assert kept(job) == {"best-10": "step 10"}
    best.state_dict()
    offer(best, 20, 2.0)
    assert kept(job) == {"best-10": "step 10", "best-20": "step 20"}
    # No better: nothing changes.
    offer(best, 30, 2.5)
    assert kept(job) == {"best-10": "step 10", "best-20": "step 20"}
    # No state tells of 20.
    offer(best, 40, 1.0)
    assert kept(job) == {"best-10": "step 10", "best-40": "step 40"}
    best.state_dict()
    best.state_dict()
    offer(best, 50, 0.5)
    assert kept(job) == {"best-40": "step 40", "best-50": "step 50"}


def test_the_best_is_copied_into_a_folder_beside_what_is_there(best, job, tmp_path):
    for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5)):
        offer(best, step, loss)
    result = tmp_path / "result"
    result.mkdir()
    (result / "metrics.jsonl").write_text("figures")
    best.copy_to(result)
    assert (result / "model").read_text() == "step 20"
    assert (result / "metrics.jsonl").read_text() == "figures"
    assert kept(job) == {"best-20": "step 20"}


@pytest.mark.parametrize("losses", [[], [3.0], [3.0, 2.0, 2.5]])
def test_it_comes_back_from_its_state(losses, best, job):
    for step, loss in enumerate(losses, start=1):
        offer(best, step, loss)
    again = BestModel(job, None)
    again.load_state_dict(json.loads(json.dumps(best.state_dict(), allow_nan=False)))
    assert (again.step, again.loss, again.evaluations_since) == (
        best.step,
        best.loss,
        best.evaluations_since,
    )


def test_a_run_that_goes_on_from_an_earlier_state_does_the_same_again(best, job, tmp_path):
    offer(best, 10, 3.0)
    state = best.state_dict()
    offer(best, 20, 2.0)
    # Stopped here; the state after step 10 is the last one.
    again = BestModel(job, Model().save)
    again.load_state_dict(state)
    again.copy_to(tmp_path / "result")
    assert (tmp_path / "result" / "model").read_text() == "step 10"
    offer(again, 20, 2.0)
    assert kept(job) == {"best-10": "step 10", "best-20": "step 20"}
    assert again.state_dict() == best.state_dict()


def test_what_a_killed_run_left_half_written_is_written_over(best, job):
    (job.states / ".best").mkdir()
    (job.states / ".best" / "model").write_text("half")
    offer(best, 10, 3.0)
    assert kept(job) == {"best-10": "step 10"}


def test_the_first_process_alone_moves_and_copies(best, job, tmp_path, monkeypatch):
    offer(best, 10, 3.0)
    monkeypatch.setattr("snakechat.training.best_model.rank", lambda: 1)
    offer(best, 20, 2.0)
    assert best.step == 20
    assert kept(job) == {"best-10": "step 10", ".best": "step 20"}
    best.copy_to(tmp_path / "result")
    assert not (tmp_path / "result").exists()
