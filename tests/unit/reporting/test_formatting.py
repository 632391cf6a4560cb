"""Numbers, durations and intervals as text."""

import pytest

from snakechat.reporting.formatting import (
    format_cell,
    format_duration,
    format_estimate,
    format_number,
    format_percent,
    format_with_interval,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(141184, "141,184"), (12345.6, "12,346"), (0.123456, "0.1235"), (1.5e-7, "1.5e-07"), (0, "0")],
)
def test_numbers_have_four_significant_digits_or_thousands_separators(value, text):
    assert format_number(value) == text
    assert format_cell(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59, "59.0 s"), (60, "0:01:00"), (86399.6, "24:00:00")],
)
def test_durations_from_a_minute_on_have_hours_and_minutes(seconds, text):
    assert format_duration(seconds) == text


def test_cells_without_a_value_are_empty():
    assert [format_cell(None), format_cell("text"), format_estimate(None)] == ["", "text", ""]


def test_a_value_without_an_interval_has_no_brackets():
    assert format_with_interval(2, None) == "2"
    assert format_with_interval(2.0, [1.5, 2.5]) == "2 (1.5 … 2.5)"
    assert format_estimate({"mean": -1, "interval_95": [-2, 0.5]}) == "-1 (-2 … 0.5)"


def test_percentages_have_one_decimal():
    assert format_percent(0.9684) == "96.8 %"
