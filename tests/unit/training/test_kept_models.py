"""Models of earlier steps, which a result contains besides its final model."""

from types import SimpleNamespace

import pytest

from snakechat.training.kept_models import KeptModels


class Training:
    """A run whose model is a file that contains the step."""

    def __init__(self, folder, keep_steps):
        settings = SimpleNamespace(keep_steps=keep_steps)
        job = SimpleNamespace(states=folder / "states", settings=settings)
        self.kept, self.result = KeptModels(job, self.save), folder / "result"

    def save(self, folder):
        folder.mkdir(parents=True)
        (folder / "model").write_text(f"step {self.step}")

    def run(self, steps):
        for self.step in steps:
            self.kept.run(self.step)

    def copies(self):
        self.kept.save_result(self.result)
        return {path.parent.name: path.read_text() for path in self.result.glob("*/model")}


@pytest.mark.parametrize(("interval", "kept"), [(0, []), (2, [2, 4, 6]), (4, [4]), (8, [])])
def test_models_are_kept_at_intervals(interval, kept, tmp_path):
    training = Training(tmp_path, interval)
    training.run(range(1, 8))
    assert training.copies() == {f"step-{step}": f"step {step}" for step in kept}


def test_a_resumed_run_keeps_the_models_of_earlier_steps(tmp_path):
    Training(tmp_path, 2).run(range(1, 6))
    half = tmp_path / "states/.kept"
    half.mkdir()
    (half / "other").write_text("half of a copy")
    # From a checkpoint of step 3, after the result folder was lost.
    again = Training(tmp_path, 2)
    again.run(range(4, 7))
    assert again.copies() == {f"step-{step}": f"step {step}" for step in (2, 4, 6)}
    assert not (again.result / "step-6/other").exists()
