"""Panels: bytes, texts, colours, lines, error bars, downsampling."""

import re

import pytest

from snakechat.reporting.curve_points import Line, downsample, moving_mean
from snakechat.reporting.curves import curve_section
from snakechat.reporting.plots import (
    COLOURS,
    Ticks,
    draw_bars,
    draw_calibration,
    draw_estimates,
    draw_lines,
    draw_trade_off,
    error_bars,
)


def english(text, **values):
    return text.format(**values)


def texts_of(svg):
    """The texts of a plot."""
    return set(re.findall(r"<text[^>]*>([^<]*)</text>", svg))


def paths_of(svg, colour):
    """The lines of a colour: their numbers of points."""
    styled = re.findall(r'<path d="([^"]*)"[^>]*style="([^"]*)"', svg, re.DOTALL)
    return [len(re.findall("[ML]", path)) for path, style in styled if f"stroke: {colour}" in style]


def test_error_bars_reach_to_the_bounds_of_the_interval():
    assert error_bars(2, [1.5, 4]) == [[0.5], [2]]
    # A mean can lie outside of its percentile interval.
    assert error_bars(2, [2.5, 4]) == [[0], [2]]
    assert error_bars(2, [1, 1.5]) == [[1], [0]]
    assert error_bars(2, None) is None


def test_a_trade_off_has_labels_and_a_colour_per_model():
    models = {"SFT": ((10, [9, 11]), (0.5, None)), "base": None, "RLHF": ((20, None), (0.75, None))}
    svg = draw_trade_off("wins & ties", models, "length (tokens)", "win rate")
    assert {"length (tokens)", "win rate"} <= texts_of(svg)
    # A model keeps its colour where another one has no value.
    assert COLOURS[2] in svg and COLOURS[1] not in svg


@pytest.mark.parametrize(
    ("percent", "values", "labels"),
    [
        (False, [0, 0.5, 1], ["0.0", "0.5", "1.0"]),
        (False, [-20000, 0, 100000], ["\N{MINUS SIGN}20,000", "0", "100,000"]),
        (False, [0.0, 2e-6, 4e-6], ["0", "2e\N{MINUS SIGN}06", "4e\N{MINUS SIGN}06"]),
        (True, [0, 0.001, 0.002], ["0.0\xa0%", "0.1\xa0%", "0.2\xa0%"]),
        (True, [0.2, 0.4, 3 * 0.2], ["20\xa0%", "40\xa0%", "60\xa0%"]),
    ],
)
def test_ticks_have_as_many_decimals_as_they_need(percent, values, labels):
    assert Ticks(percent).format_ticks(values) == labels


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_axis_of_a_share_has_no_ticks_beyond_its_bounds(share):
    texts = texts_of(draw_estimates("ties", {"a": (share, None)}, percent=True))
    ticks = [float(text.removesuffix("\xa0%")) for text in texts if text.endswith("%")]
    assert ticks and all(0 <= tick <= 100 for tick in ticks)


def test_two_points_are_not_joined():
    pair, curve = [(0, 3.0), (9, 1.0)], [(0, 3.0), (4, 2.0), (9, 1.0)]
    assert paths_of(draw_lines("loss", {"": Line(pair)}, "step"), COLOURS[0]) == []
    assert paths_of(draw_lines("loss", {"": Line(curve)}, "step"), COLOURS[0]) == [3]


def test_long_lines_show_raw_values_and_their_moving_mean():
    points = [(step, float(step % 2)) for step in range(60)]
    svg = draw_lines("loss", {"": Line(points)}, "step")
    assert len(paths_of(svg, COLOURS[0])) == 2
    assert moving_mean([0.0, 3.0, 6.0]) == [1.5, 3.0, 4.5]
    short = draw_lines("loss", {"": Line(points[:20])}, "step")
    assert len(paths_of(short, COLOURS[0])) == 1


def test_many_points_are_averaged():
    points = [(step, float(step)) for step in range(1, 901)]
    assert len(downsample(points)) == 300
    assert downsample(points)[:2] == [(2, 2.0), (5, 5.0)]
    assert downsample(points[:300]) == points[:300]
    ranges = [(step, step, step - 1, step + 1) for step, _ in points]
    assert downsample(ranges)[1] == (5, 5, 4, 6)


def test_curves_have_held_out_rows_and_notes_on_how_to_read_them():
    steps = [{"step": 0, "eval_loss": 3.0}, *({"step": n, "loss": 2.0} for n in range(1, 40))]
    section = curve_section("SFT", steps, {"loss": "loss", "other": "other"}, english)
    assert [panel.title for panel in section.panels] == ["loss"]
    assert section.legend == ["training", "held-out rows"]
    assert "mean over 3 neighbouring steps" in section.caption
    assert curve_section("SFT", steps[:3], {"loss": "loss"}, english).caption.startswith("So few")


def test_the_same_data_gives_the_same_bytes_and_panels_refer_to_ids_of_their_own():
    bins = [(0.6, (0.5, [0.25, 0.75])), (0.9, (1.0, [0.5, 1.0]))]
    first, again, other = (
        draw_calibration(title, bins, "confidence", "accuracy") for title in ("a", "a", "b")
    )
    assert first == again
    ids = [set(re.findall(r'url\(#(.*?)\)|href="#(.*?)"', svg)) for svg in (first, other)]
    assert ids[0] and not ids[0] & ids[1]


def test_names_are_escaped():
    svg = draw_estimates("ties", {"<script>&": (0.5, None)})
    assert "&lt;script&gt;&amp;" in svg and "<script" not in svg


def test_unknown_values_have_no_bar():
    svg = draw_bars("time (s)", {"a": {"x": 1.0}, "b": {"x": None}}, "seconds")
    assert {"seconds", "a", "b"} <= texts_of(svg)


def test_text_stays_text_for_other_scripts():
    svg = draw_lines("损失", {"": Line([(1, 0.5)])}, "步")
    assert "步" in texts_of(svg)
