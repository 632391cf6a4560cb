"""Intervals of proportions and of means, against published values and by hand."""

import math

import pytest

from snakechat.reporting.intervals import mean_interval, proportion_interval


@pytest.mark.parametrize(
    ("fraction", "count", "interval"),
    # Wilson's intervals as Newcombe 1998 and others print them.
    [(0, 10, [0, 0.2775]), (0.5, 10, [0.2366, 0.7634]), (81 / 263, 263, [0.2553, 0.3662])],
)
def test_wilson_intervals_of_proportions(fraction, count, interval):
    assert proportion_interval(fraction, count) == pytest.approx(interval, abs=1e-4)


def test_student_interval_by_hand():
    # 1, 2, 3: mean 2, standard deviation 1, t of two degrees of freedom 4.303.
    half = 4.3027 / math.sqrt(3)
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx([2 - half, 2 + half], abs=1e-4)


def test_equal_values_have_an_interval_without_width():
    assert mean_interval([5.0, 5.0]) == [5, 5]
