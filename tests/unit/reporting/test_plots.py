"""Plots: bytes, labels, panels, error bars, downsampling."""

import re

import pytest

from snakechat.reporting.plots import (
    curve_panels,
    draw_bars,
    draw_calibration,
    draw_curves,
    draw_trade_off,
    error_bars,
)


def texts_of(svg):
    """The texts of a plot, which matplotlib writes as comments."""
    return set(re.findall(r"<!-- (.*?) -->", svg.read_text()))


def test_error_bars_reach_to_the_bounds_of_the_interval():
    assert error_bars(2, [1.5, 4]) == [[0.5], [2]]
    # A mean can lie outside of its percentile interval.
    assert error_bars(2, [2.5, 4]) == [[0], [2]]
    assert error_bars(2, [1, 1.5]) == [[1], [0]]
    assert error_bars(2, None) is None


def test_a_trade_off_has_labels_of_axes_panels_and_models(tmp_path):
    path = tmp_path / "wins.svg"
    models = {"SFT": (10, [9, 11], 0.5, None), "RLHF": (20, [19, 21], 0.75, [0.5, 1])}
    draw_trade_off(path, {"by score": models}, "length (tokens)", "win rate")
    assert {"length (tokens)", "win rate", "by score", "SFT", "RLHF"} <= texts_of(path)


def test_two_panels_share_a_row(tmp_path):
    path = tmp_path / "curves.svg"
    points = {"": [(1, 0.5), (2, 0.25)]}
    draw_curves(path, {name: points for name in "abcde"})
    width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', path.read_text()).groups())
    assert (width, height) == pytest.approx((72 * 9.2, 72 * 9.6), rel=0.01)
    assert texts_of(path) >= {"a", "b", "c", "d", "e", "step"}


def test_many_points_are_averaged_with_their_range():
    steps = [{"step": step, "loss": float(step)} for step in range(1, 301)]
    [lines] = curve_panels(steps, {"loss": "loss"}).values()
    assert len(lines[""]) == 100
    assert lines[""][:2] == [(2, 2.0, 1.0, 3.0), (5, 5.0, 4.0, 6.0)]
    [lines] = curve_panels(steps[:100], {"loss": "loss"}).values()
    assert lines[""][-1] == (100, 100.0)


def test_held_out_rows_are_a_line_of_the_steps_that_evaluate_them():
    steps = [{"step": 0, "eval_loss": 3.0}, {"step": 1, "loss": 2.0}]
    [lines] = curve_panels(steps, {"loss": "loss"}, "held-out").values()
    assert lines == {"": [(1, 2.0)], "held-out": [(0, 3.0)]}


def test_the_same_data_gives_the_same_bytes(tmp_path):
    paths = [tmp_path / "1.svg", tmp_path / "2.svg"]
    for path in paths:
        draw_calibration(path, [(0.6, 0.5, [0.25, 0.75], 8), (0.9, 1.0, [0.5, 1.0], 4)])
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_unknown_values_have_no_bar(tmp_path):
    path = tmp_path / "costs.svg"
    draw_bars(path, {"time (s)": {"a": 1.0, "b": None}, "memory": {"a": None, "b": 2.0}})
    assert {"time (s)", "memory", "a", "b"} <= texts_of(path)


def test_text_stays_text_for_other_scripts(tmp_path):
    path = tmp_path / "curves.svg"
    draw_curves(path, {"损失": {"": [(1, 0.5)]}}, "步", text_as_text=True)
    assert ">损失</text>" in path.read_text() and ">步</text>" in path.read_text()
