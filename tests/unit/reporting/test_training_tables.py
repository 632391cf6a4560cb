"""Tables of a training: before and after it, and of each epoch."""

import math

import pytest

from snakechat.reporting.page_parts import Cell
from snakechat.reporting.training_tables import held_out_changes, mean_of, training_tables

SFT = {
    "before": {"response_perplexity": math.e**2, "perplexity": math.e},
    "after": {"response_perplexity": math.e, "perplexity": 1.0},
}
# Three rows in batches of two: two epochs of two steps.
STEPS = [
    {"step": 1, "loss": 4.0, "tokens": 30},
    {"step": 2, "loss": 2.0, "tokens": 10},
    {"step": 3, "loss": 1.0, "tokens": 20},
    {"step": 4, "loss": 3.0, "tokens": 20},
]


def tables(stage, metrics, steps):
    settings = {"global_batch_size": 2, "rollout_batch_size": 2}
    return training_tables(stage, settings, metrics, steps, 3)


def test_sft_has_losses_before_and_after_and_the_loss_of_each_epoch():
    held_out, epochs = tables("sft", SFT, STEPS)
    assert held_out.head == ["", "before training", "after training"]
    assert held_out.rows == [
        ["loss of responses (nats per token)", Cell("2.00"), Cell("1.00")],
        ["loss of prompts and responses (nats per token)", Cell("1.00"), Cell("0")],
    ]
    # (4 * 30 + 2 * 10) / 40 = 3.5 nats per token.
    assert epochs.rows == [["1", Cell("3.50")], ["2", Cell("2.00")]]


def test_a_reward_model_has_the_evaluation_before_training():
    initial = {"accuracy": 0.475, "loss": 0.7, "chosen_score": 0.1, "rejected_score": 0.2}
    after = {"accuracy": 0.61, "loss": 0.66, "chosen_score": 5.77, "rejected_score": 5.55}
    first = {"step": 0, **{f"eval_{key}": value for key, value in initial.items()}}
    changes = list(held_out_changes("reward", after, [first, *STEPS]))
    assert changes[0] == ("accuracy", "accuracy", 0.475, 0.61)
    assert changes[-1][2:] == (0.2, 5.55)
    assert list(held_out_changes("dpo", after, STEPS)) == []
    lines = [{"step": step, **after} for step in (1, 2)]
    _, epochs = tables("reward", after, [first, *lines])
    assert epochs.rows == [
        ["1", Cell("0.660"), Cell("61.0\N{NO-BREAK SPACE}%"), Cell("5.77"), Cell("5.55")]
    ]


def test_the_mean_of_a_metric_that_no_step_has():
    assert math.isnan(mean_of(STEPS, "value/loss"))
    assert mean_of([{"a": 1.0}, {"b": 1.0}, {"a": 2.0}], "a") == pytest.approx(1.5)
