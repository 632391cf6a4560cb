"""Metrics of benchmarks, read from the files of a command, and their intervals."""

import json
import re

import pytest

from run_benchmark import read_metric
from snakechat.workflow.errors import InputError

RESULTS = {
    "results": {
        "task": {
            "acc,none": 0.5,
            "acc_stderr,none": 0.1,
            "exact": 1,
            "exact_stderr": "N/A",
            "by_item": [1, 0, 1, 1],
        }
    }
}


@pytest.fixture
def folder(tmp_path):
    """The files of a command."""
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "deep/er/results_1.json").write_text(json.dumps(RESULTS))
    lines = [{"id": number, "score": {"acc": number % 2}} for number in range(10)]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[[1.5, 2]]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "bytes.json").write_bytes(b"\xff")
    return tmp_path


def test_a_number_with_a_standard_error_has_a_normal_interval(folder):
    found = read_metric(folder, "**/results_*.json", ["results", "task", "acc,none"])
    value, interval, items = found
    # 0.5 -+ 1.96 * 0.1
    assert value == 0.5 and interval == pytest.approx([0.304, 0.696], abs=1e-4) and items == []


def test_a_number_without_one_has_no_interval(folder):
    found = read_metric(folder, "**/results_*.json", ["results", "task", "exact"])
    assert found == (1.0, None, [])
    assert read_metric(folder, "list.json", [0, 1]) == (2.0, None, [])


def test_only_numbers_that_are_finite_are_metrics(folder):
    files = {"nan": "[NaN]", "huge": f"[{10**400}]", "inf": "[1e999]", "items": "[[0, NaN, 1]]"}
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
        with pytest.raises(InputError, match=f"^{name}.json: expected a number, found"):
            read_metric(folder, f"{name}.json", [0])
    (folder / "error.json").write_text('{"acc": 0.5, "acc_stderr": NaN}')
    assert read_metric(folder, "error.json", ["acc"]) == (0.5, None, [])


def test_json_lines_end_at_a_newline_alone(folder):
    lines = '{"text": "\u2028\u0085", "acc": 1}\n\n{"text": "", "acc": 0}\n\n'
    (folder / "texts.jsonl").write_text(lines)
    assert read_metric(folder, "texts.jsonl", ["acc"])[2] == [1, 0]


@pytest.mark.parametrize(
    ("pattern", "keys", "mean"),
    [("items.jsonl", ["score", "acc"], 0.5), ("*/*/*.json", ["results", "task", "by_item"], 0.75)],
)
def test_results_by_item_have_the_interval_of_their_mean(pattern, keys, mean, folder):
    value, (low, high), items = read_metric(folder, pattern, keys)
    assert value == mean == sum(items) / len(items)
    assert 0 < low < mean < high < 1


@pytest.mark.parametrize(
    ("pattern", "keys", "message"),
    {
        "none": ("*.csv", [], "*.csv matches 0 files in {output}, expected 1: none"),
        "several": (
            "*.json",
            [],
            "*.json matches 4 files in {output}, expected 1: broken",
        ),
        "no key": (
            "**/results_*",
            ["results", "task", "f1"],
            "there is no 'f1' in {'acc,none': 0.5, 'acc_stderr,none'",
        ),
        "no number": ("**/results_*", ["results"], "results_1.json: expected a number, found {'t"),
        "no JSON": ("broken.json", [], "broken.json is not JSON"),
        "nested": ("deep.json", [], "deep.json is not JSON"),
        "no text": ("bytes.json", [], "bytes.json is not JSON"),
    }.values(),
)
def test_what_is_no_metric_is_one_line(pattern, keys, message, folder):
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        read_metric(folder, pattern, keys)
