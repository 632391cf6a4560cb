"""Metrics of a run: JSON lines, TensorBoard scalars, times."""

import json
import math
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from snakechat.training.metric_logs import MetricsLogger
from snakechat.workflow.errors import InputError


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    return SimpleNamespace(
        result=tmp_path / "job",
        log_folder=tmp_path / "job.logs",
        spec={"rule": "train_sft", "name": "mine"},
    )


def scalars(job, name):
    board = EventAccumulator(str(job.log_folder / "tensorboard"))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(name)]


def test_a_resumed_run_appends_lines_and_has_each_scalar_once(job):
    with MetricsLogger(job, 5) as logger:
        for step in range(1, 5):
            logger.log(step, {"loss": step / 8})
    # The fourth step was logged, but the checkpoint is that of the third. With other
    # spaces: existing lines are kept as they are.
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
