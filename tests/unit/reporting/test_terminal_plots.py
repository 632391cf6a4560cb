"""Curves of braille patterns, against dots placed by hand."""

import pytest

from snakechat.reporting.terminal_plots import plot_curve


def dots(plot):
    """The dots of a plot as rows of text."""
    rows = []
    for line in plot.lines:
        for bits in ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80)):
            rows.append("".join("#" if ord(each) & bit else " " for each in line for bit in bits))
    return rows


def test_a_line_rises_from_its_first_to_its_last_step():
    plot = plot_curve([(step, step) for step in range(1, 5)], 2, 1)
    assert dots(plot) == ["   #", "  # ", " #  ", "#   "]
    assert (plot.low, plot.high) == (1, 4)


def test_points_far_apart_are_joined():
    assert dots(plot_curve([(0, 0.0), (3, 0.0)], 2, 1))[2] == "####"
    jump = dots(plot_curve([(0, 0.0), (1, 7.0)], 1, 2))
    # Each row has a dot of the line.
    assert all("#" in row for row in jump)


@pytest.mark.parametrize("points", [[(5, 2.0)], [(0, 2.0), (9, 2.0)]])
def test_one_point_and_a_constant_lie_in_the_middle(points):
    plot = plot_curve(points, 3, 3)
    assert plot.low == plot.high == 2.0
    assert [number for number, row in enumerate(dots(plot)) if "#" in row] == [6]


def test_points_of_a_column_are_averaged():
    points = [(step, float(step % 2)) for step in range(400)]
    plot = plot_curve(points, 10, 2)
    assert 0.4 < plot.low <= plot.high < 0.6
