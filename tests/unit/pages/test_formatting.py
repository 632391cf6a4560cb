"""Numbers, durations and intervals as text."""

import math

import pytest

from snakechat.pages.metrics import Figure, format_duration, format_number, run_value
from snakechat.pages.page import figure_cell, format_metric


def test_pages_show_three_significant_digits():
    texts = {
        141184: "141,184",
        12345.6: "12,300",
        0.5: "0.500",
        0.99961: "1.00",
        -19.04: "\N{MINUS SIGN}19.0",
        -1.5e-7: "\N{MINUS SIGN}1.50e-07",
        0.0: "0",
        math.nan: "nan",
    }
    assert {value: format_number(value) for value in texts} == texts


def test_differences_have_a_sign_and_percentage_points():
    assert [format_number(value, signed=True) for value in (2.0, 0.0)] == ["+2.00", "0"]
    assert format_metric("ties", 0.5) == "50.0\N{NO-BREAK SPACE}%"
    assert format_metric("ties", -0.0123, signed=True) == "\N{MINUS SIGN}1.2\N{NO-BREAK SPACE}pp"
    difference = figure_cell("score", Figure(0.5, [-1.0, 2.0], scale=0))
    assert difference == ("+0.500", "[\N{MINUS SIGN}1.00, +2.00]", "")
    assert figure_cell("score", Figure(0.5)) == ("0.500", "", "")


@pytest.mark.parametrize(
    ("value", "interval", "texts"),
    [
        (48912.3, [48893.1, 48931.6], ("48,910", "[48,890, 48,930]")),
        (1.23456, [1.23446, 1.23466], ("1.2346", "[1.2345, 1.2347]")),
        # Equal bounds, and a distance that the usual digits show.
        (12345.6, [12345.6, 12345.6], ("12,300", "[12,300, 12,300]")),
        (12345.6, [11111.1, 13333.3], ("12,300", "[11,100, 13,300]")),
    ],
)
def test_narrow_intervals_keep_the_digits_in_which_their_bounds_differ(value, interval, texts):
    assert figure_cell("score", Figure(value, interval))[:2] == texts


def test_memory_and_rates_have_one_unit_and_durations_hours_and_minutes():
    seconds = {59: "59.0 s", 60: "0:01:00", 86399.6: "24:00:00"}
    assert {value: format_duration(value) for value in seconds} == seconds
    assert run_value("peak_memory_mb", 459) == "0.459\N{NO-BREAK SPACE}GB"
    assert run_value("flops_per_second", 8.64e10) == "0.0864\N{NO-BREAK SPACE}TFLOP/s"
