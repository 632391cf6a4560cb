"""Metrics of benchmarks, read from the files of a command, and their intervals."""

import json

import pytest

from run_benchmark import read_metric
from snakechat.workflow.errors import InputError

TASK = {"acc,none": 0.5, "acc_stderr,none": 0.1, "by_item": [1, 0, 1, 1]}
TASK |= {"exact": 1, "exact_stderr": "N/A"}


@pytest.fixture
def folder(tmp_path):
    """The files of a command."""
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "deep/er/results_1.json").write_text(json.dumps({"results": {"task": TASK}}))
    lines = [{"id": number, "score": {"acc": number % 2}} for number in range(10)]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "list.json").write_text("[[1.5, 2]]")
    return tmp_path


def test_a_number_with_a_standard_error_has_a_normal_interval(folder):
    path = "**/results_*.json", ["results", "task"]
    value, interval, items = read_metric(folder, path[0], [*path[1], "acc,none"])
    # 0.5 -+ 1.96 * 0.1
    assert value == 0.5 and interval == pytest.approx([0.304, 0.696], abs=1e-4) and items == []
    assert read_metric(folder, path[0], [*path[1], "exact"]) == (1.0, None, [])
    assert read_metric(folder, "list.json", [0, 1]) == (2.0, None, [])


def test_only_numbers_that_are_finite_are_metrics(folder):
    files = {"nan": "[NaN]", "huge": f"[{10**400}]", "inf": "[1e999]", "items": "[[0, NaN, 1]]"}
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
        with pytest.raises(InputError, match=f"^{name}.json: expected a number, found"):
            read_metric(folder, f"{name}.json", [0])
    for error in ("NaN", "0", 10**400):
        (folder / "error.json").write_text(f'{{"acc": 0.5, "acc_stderr": {error}}}')
        assert read_metric(folder, "error.json", ["acc"]) == (0.5, None, [])
    with pytest.raises(InputError, match=r"^error\.json has no acc\.none$"):
        read_metric(folder, "error.json", ["acc", "none"])


def test_results_by_item_have_the_interval_of_their_mean(folder):
    for path, mean in (
        (("items.jsonl", ["score", "acc"]), 0.5),
        (("*/*/*.json", ["results", "task", "by_item"]), 0.75),
    ):
        value, (low, high), items = read_metric(folder, *path)
        assert value == mean == sum(items) / len(items)
        assert 0 < low < mean < high < 1
    # JSON lines end at a newline alone.
    lines = '{"text": "\u2028\u0085", "acc": 1}\n\n{"text": "", "acc": 0}\n\n'
    (folder / "texts.jsonl").write_text(lines)
    assert read_metric(folder, "texts.jsonl", ["acc"])[2] == [1, 0]
