"""Training logs of DeepSpeed-Chat: what its mains print, as our metrics."""

import pytest

from snakechat.pages.deepspeed_chat import read_log
from snakechat.workflow.errors import InputError

TIMER = "worker-0: [INFO] epoch=0/micro_step=20/global_step=10, RunningAvgSamplesPerSec=171.5,"
TIMER += " CurrSamplesPerSec=170.25, MemAllocated=4.3GB, MaxMemAllocated=22.5GB\n"
OLD = "chosen_last_scores (higher is better) : 2.75, acc (higher is better) : 0.5\n"
NEW = "chosen_last_scores (higher is better) : 2.25, rejected_last_scores (lower is better) : -1.5,"
NEW += " acc (higher is better) : 0.75\n"
RECORD = {"rows_per_second": 171.5, "peak_gpu_memory_mb": 22.5 * 1024}
# The stage, the log, and its metrics and measurements.
LOGS = [
    (
        "sft",
        f"worker-0: ppl: 4998.5, loss: 8.5\n{TIMER}ppl: 2.125, loss: 0.75\nppl: 2.0\n",
        {"before": {"perplexity": 4998.5}, "after": {"perplexity": 2.0}},
        RECORD,
    ),
    # A training that has ended early.
    ("sft", "ppl: inf", {"before": {"perplexity": float("inf")}, "after": {}}, {}),
    (
        "reward",
        OLD + TIMER + NEW,
        {
            "before": {"chosen_score": 2.75, "accuracy": 0.5},
            "chosen_score": 2.25,
            "rejected_score": -1.5,
            "accuracy": 0.75,
        },
        RECORD,
    ),
    (
        "dpo",
        "chosen: 0.0, rejected: -1e-3, loss: 0.75\nchosen: -31.5, rejected: -34.0, loss: 0.5\n",
        {
            "before": {"chosen_score": 0.0, "rejected_score": -0.001, "loss": 0.75},
            **{"chosen_score": -31.5, "rejected_score": -34.0, "loss": 0.5},
        },
        {},
    ),
]


@pytest.fixture
def read(tmp_path):
    """A function that reads a log with a text."""

    def read(text, stage):
        (tmp_path / "training.log").write_text(text)
        return read_log(tmp_path / "training.log", "mine", stage)

    return read


@pytest.mark.parametrize(("stage", "text", "metrics", "record"), LOGS)
def test_an_evaluation_before_and_the_last_one_are_results(read, stage, text, metrics, record):
    assert read(text, stage) == ([], metrics, record)


@pytest.mark.parametrize(
    ("latency", "record"),
    [
        (
            "|E2E latency={}s |CurSamplesPerSec=17.0 |AvgSamplesPerSec=16.5",
            {"rows_per_second": 16.5},
        ),
        ("End-to-End => Latency: {}s, TFLOPs: 9.5, Samples/sec: 1.0", {}),
    ],
)
def test_rewards_of_rlhf_are_a_curve(read, latency, record):
    lines = [f"{latency.format(n)}\nAverage reward score: {n / 4} | EMA" for n in (3, 4, 8)]
    steps, metrics, measured = read("\n".join(lines), "rlhf")
    assert steps[0] == {"step": 1, "objective/scores": 0.75} and len(steps) == 3
    assert (metrics, measured) == ({}, {"seconds_per_step": 4.0, **record})


def test_a_log_of_another_stage_or_program_is_an_error(read):
    with pytest.raises(InputError, match=r"logs.mine: .*training.log is a log of reward: expected"):
        read(NEW, "sft")
    with pytest.raises(
        InputError, match="of another program: expected one of DeepSpeed-Chat's dpo"
    ):
        read("Epoch 1", "dpo")
