"""Intervals of proportions, means and differences, against published values and by hand."""

import math

import numpy as np
import pytest

from snakechat.reporting.intervals import (
    difference_interval,
    mean_interval,
    proportion_interval,
    ratio_interval,
)


@pytest.mark.parametrize(
    ("fraction", "count", "interval"),
    # Wilson's intervals as Newcombe 1998 and others print them.
    [(0, 10, [0, 0.2775]), (0.5, 10, [0.2366, 0.7634]), (81 / 263, 263, [0.2553, 0.3662])],
)
def test_wilson_intervals_of_proportions(fraction, count, interval):
    assert proportion_interval(fraction, count) == pytest.approx(interval, abs=1e-4)


def test_student_interval_by_hand_stays_within_the_bounds():
    # 1, 2, 3: mean 2, standard deviation 1, t of two degrees of freedom 4.303.
    half = 4.3027 / math.sqrt(3)
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx([2 - half, 2 + half], abs=1e-4)
    assert mean_interval([1.0, 2.0, 3.0], 0, 3) == [0, 3]
    # Equal values have an interval without width.
    assert mean_interval([5.0, 5.0]) == [5, 5]


def test_welchs_interval_by_hand():
    # Variances 1 and 4, three values each: standard error sqrt(5/3), degrees of freedom (5/3)^2 /
    # ((1/3)^2 / 2 + (4/3)^2 / 2) = 2.941, between t of 2 (4.303) and of 3 (3.182).
    low, high = difference_interval([2.0, 3.0, 4.0], [0.0, 2.0, 4.0])
    assert (low + high) / 2 == pytest.approx(1)
    assert 3.182 < (high - low) / 2 / math.sqrt(5 / 3) < 3.3


def test_differences_without_an_estimate_of_the_variance_have_no_interval():
    assert difference_interval([1.0, 1.0], [2.0, 2.0]) is None
    assert difference_interval([1.0, 1.0], [2.0, 4.0]) is not None


def test_interval_of_a_ratio_by_hand():
    # Fewer than two rows have none.
    assert ratio_interval(np.ones(1), np.ones(1)) is None
    # Ratio 6 / 4, residuals -0.5, 0.5, 0: standard error sqrt(3 / 2 * 0.5) / 4, t 4.3027.
    half = 4.3027 * math.sqrt(0.75) / 4
    found = ratio_interval(np.array([1.0, 2.0, 3.0]), np.array([1, 1, 2]))
    assert found == pytest.approx([1.5 - half, 1.5 + half], abs=1e-4)
