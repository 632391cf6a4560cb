"""Figures of metrics.json: numbers by path, with their intervals."""

from snakechat.reporting.metric_values import read_figure

METRICS = {
    "pairs": 400,
    "accuracy": 0.9675,
    "by_dataset": {"a.b": {"pairs": 100, "accuracy": 1.0}},
    "rlhf": {"score": 2.0, "name": "x"},
    "intervals_95": {"rlhf": {"score": [1.5, 2.5]}},
    "wins": {"rlhf": {"sft": {"score": {"mean": 0.75, "interval_95": [0.5, 1.0], "longer": 0.5}}}},
}


def test_figures_have_the_intervals_of_the_evaluation():
    assert read_figure(METRICS, "rlhf.score") == (2.0, [1.5, 2.5], 1)
    assert read_figure(METRICS, "wins.rlhf.sft.score") == (0.75, [0.5, 1.0], 1)
    assert read_figure(METRICS, "wins.rlhf.sft.score.longer") == (0.5, None, 1)
    for path in ("rlhf", "rlhf.name", "rlhf.none", "none.score"):
        assert read_figure(METRICS, path) is None


def test_fractions_of_pairs_have_wilsons_interval():
    value, (low, high), _ = read_figure(METRICS, "accuracy")
    assert (value, round(low, 3), round(high, 3)) == (0.9675, 0.945, 0.981)
    assert read_figure(METRICS, "by_dataset.a.b.accuracy").interval[1] == 1.0
