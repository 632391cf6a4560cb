"""Metrics of a run: JSON lines, TensorBoard scalars, times."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from snakechat.training import metrics
from snakechat.training.metrics import MetricsLogger, StepTimer
from snakechat.workflow.errors import InputError


@pytest.fixture
def make_job(tmp_path):
    def job(name="job"):
        result = tmp_path / name
        result.mkdir(exist_ok=True)
        return SimpleNamespace(
            result=result, log_folder=tmp_path / f"{name}.logs", spec={"rule": "train_sft"}
        )

    return job


def log_steps(job, steps=3):
    with MetricsLogger(job, steps) as logger:
        for step in range(1, steps + 1):
            logger.log(step, ["objective/kl"], **{"objective/kl": step / 8, "loss": 2.0 / step})


def test_each_step_is_one_json_line_of_its_metrics(make_job):
    job = make_job()
    log_steps(job)
    lines = (job.result / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "objective/kl": 0.125, "loss": 2.0},
        {"step": 2, "objective/kl": 0.25, "loss": 1.0},
        {"step": 3, "objective/kl": 0.375, "loss": 2.0 / 3},
    ]


LINES = [{"prompt": "\n\nHuman: *Hi*", "response": " <b>Yes</b>", "score": 0.123456, "kl": 1.0}]


def test_responses_are_logged_as_json_lines_and_to_tensorboard(make_job):
    job = make_job()
    with MetricsLogger(job, 2) as logger:
        logger.log_responses(1, LINES)
    # A resumed run.
    with MetricsLogger(job, 2) as logger:
        logger.log_responses(2, LINES)
    lines = (job.result / "responses.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": n, **LINES[0]} for n in (1, 2)]
    events = EventAccumulator(str(job.log_folder / "tensorboard"))
    events.Reload()
    logged = events.Tensors("responses/text_summary")
    assert [event.step for event in logged] == [1, 2]
    text = logged[1].tensor_proto.string_val[0].decode()
    # Indented, which is code in Markdown.
    assert text == "\n\n    Human: *Hi* <b>Yes</b>\n    [score 0.1235]"


def scalars(job, name):
    board = EventAccumulator(str(job.log_folder / "tensorboard"))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(name)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_stops_the_run(make_job, value):
    with MetricsLogger(make_job(), 3) as logger:
        logger.log(1, ["loss"], loss=2.0)
        message = rf"step 2, rows \[3, 7\]: loss is {value}, training has diverged: try a lower"
        with pytest.raises(InputError, match=message):
            logger.log(2, ["loss"], [7, 3], loss=value)


@pytest.fixture
def resumed(make_job):
    """A job whose first three of five steps are done, and their lines."""
    job = make_job()
    with MetricsLogger(job, 5) as logger:
        for step in range(1, 5):
            logger.log(step, ["loss"], loss=step / 8)
    # The fourth step was logged, but the checkpoint is that of the third. With other
    # spaces: existing lines are kept as they are.
    before = b'{"step": 1, "loss": 0.125}\n{"loss":0.25, "step":2}\n{"step": 3, "loss": 3.75e-1}\n'
    (job.result / "metrics.jsonl").write_bytes(before)
    return job, before


def resume(job):
    with MetricsLogger(job, 5) as logger:
        logger.log(4, ["loss"], loss=4.0)
        logger.log(5, ["loss"], loss=5.0)


def test_a_resumed_run_appends_to_the_existing_lines(resumed):
    job, before = resumed
    resume(job)
    assert (job.result / "metrics.jsonl").read_bytes() == (
        before + b'{"step": 4, "loss": 4.0}\n{"step": 5, "loss": 5.0}\n'
    )


def test_a_resumed_run_has_each_scalar_once(resumed):
    job, _ = resumed
    resume(job)
    assert scalars(job, "loss") == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 4.0), (5, 5.0)]


def times_of(job):
    return [json.loads(line) for line in (job.log_folder / "times.jsonl").read_text().splitlines()]


def test_times_are_written_to_the_log_folder_and_not_into_the_result(make_job):
    job = make_job()
    with MetricsLogger(job, 2) as logger:
        for step in (1, 2):
            logger.log(step, [], loss=1.0)
            logger.log_times(step, {"generate": 3.0, "train": 2.0}, 100 * step, responses=8)
    sections = {"generate": 3.0, "train": 2.0, "responses": 8}
    # 100 and 200 tokens in 5 seconds.
    assert times_of(job) == [
        {"step": 1, **sections, "tokens": 100, "tokens_per_second": 20.0},
        {"step": 2, **sections, "tokens": 200, "tokens_per_second": 40.0},
    ]
    assert scalars(job, "times/tokens_per_second") == [(1, 20.0), (2, 40.0)]
    assert scalars(job, "times/train") == [(1, 2.0), (2, 2.0)]
    assert [path.name for path in job.result.iterdir()] == ["metrics.jsonl"]
    assert "times" not in (job.result / "metrics.jsonl").read_text()


def log_times(job, *steps):
    with MetricsLogger(job, 4) as logger:
        for step in steps:
            logger.log(step, [], loss=1.0)
            logger.log_times(step, {"all": 1.0}, 1)
    return [line["step"] for line in times_of(job)]


def test_a_resumed_run_appends_times_and_a_new_run_replaces_them(make_job):
    job = make_job()
    assert log_times(job, 1, 2) == [1, 2]
    assert log_times(job, 3, 4) == [1, 2, 3, 4]
    (job.result / "metrics.jsonl").unlink()
    assert log_times(job, 1) == [1]


@pytest.fixture
def timer_of(monkeypatch):
    """A function that returns a timer which reads these times one after the other."""

    def make(device, *times):
        monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=iter(times).__next__))
        return StepTimer(torch.device(device))

    return make


def test_a_timer_synchronizes_a_gpu_before_it_starts_and_stops(timer_of, monkeypatch):
    synchronized = []
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    with timer_of("cuda:1", 0.0, 1.0)("a"):
        assert synchronized == [torch.device("cuda:1")]
    assert synchronized == [torch.device("cuda:1")] * 2
    with timer_of("cpu", 0.0, 1.0)("a"):
        pass
    assert len(synchronized) == 2


def test_a_metric_of_none_is_skipped(make_job):
    job = make_job()
    with MetricsLogger(job, 1) as logger:
        logger.log(1, ["loss"], loss=2.0, grad_norm=None)
    assert json.loads((job.result / "metrics.jsonl").read_text()) == {"step": 1, "loss": 2.0}
    assert scalars(job, "loss") == [(1, 2.0)]
