"""cache.py lists versions of results, removes what is not needed and verifies the rest."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cache import format_size
from conftest import ROOT
from snakechat.workflow.result_cache import ResultCache
from support.cached_results import make_result

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d"
RESULT = Path("output/sft/tiny")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with three versions of a result, the newest one in output/, and another result."""
    monkeypatch.chdir(tmp_path)
    cache = ResultCache(Path("output/.cache"), None)
    versions = ({"epochs": 1}, {"epochs": 2}, {"epochs": 2, "seed": 5})
    for number, settings in enumerate(versions):
        shutil.rmtree(RESULT, ignore_errors=True)
        key = make_result(RESULT, {"model": "x" * number}, **settings)
        cache.put(key, RESULT)
        set_time(cache, key, number)
    other = make_result(Path("output/sft/other"))
    cache.put(other, Path("output/sft/other"))
    return cache


def set_time(cache, key, number):
    """Set the day on which an entry was stored and last used."""
    path = cache.folder / key[:2] / key / "entry.json"
    record = json.loads(path.read_text()) | {"created": f"2026-01-0{number + 1}T12:00:00+00:00"}
    path.write_text(json.dumps(record | {"host": f"node{number}"}))
    os.utime(path, (time.time() - (10 - number) * 24 * 3600,) * 2)


def run(*arguments):
    """Run cache.py; return its exit code, and its output by lines."""
    process = subprocess.run(
        [sys.executable, ROOT / "scripts/cache.py", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TZ": "UTC"},
    )
    return process.returncode, process.stdout.splitlines()


def test_results_are_listed(cache):
    code, [other, tiny, total] = run("list")
    assert code == 0
    assert re.fullmatch(rf"{TIME}           9 B     1 version   output/sft/other", other)
    assert tiny == "2026-01-03 12:00           3 B     3 versions  output/sft/tiny"
    assert total == "4 results, 12 B (files that output/ shares take no space)"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 29, "1.5 GiB"),
        (2 << 40, "2.0 TiB"),
        (1 << 60, "1,048,576.0 TiB"),
    ],
)
def test_sizes_are_readable(number, text):
    assert format_size(number) == text


@pytest.mark.parametrize("target", ["output/sft/tiny", "output/sft/tiny/"])
def test_versions_are_listed_with_what_changed(cache, target):
    folders = [entry.folder for entry in cache.entries() if entry.path == str(RESULT)]
    assert run("list", target) == (
        0,
        [
            "2026-01-03 12:00           2 B  node2  current",
            f"  {folders[2]}",
            "    seed was added: 5",
            "2026-01-02 12:00           1 B  node1",
            f"  {folders[1]}",
            "    sft.epochs changed from 1 to 2",
            "2026-01-01 12:00           0 B  node0",
            f"  {folders[0]}",
        ],
    )
    assert (folders[1] / "model").read_text() == "x"


def test_a_listing_says_if_the_current_result_is_not_in_the_cache(cache):
    make_result(RESULT, {"model": "mine"}, epochs=3)
    assert run("list", str(RESULT))[1][-1] == "the cache does not have the current output/sft/tiny"
    RESULT.with_name("tiny.manifest.json").unlink()
    assert run("list", str(RESULT))[1][-1] == "there is no output/sft/tiny"


def test_a_version_without_a_readable_manifest_is_listed(cache):
    first = cache.entries()[0].folder / "manifest.json"
    first.write_text("{")
    code, lines = run("list", str(RESULT))
    assert code == 0 and "    a manifest cannot be read" in lines


def test_results_are_removed_by_size_and_age(cache):
    assert run("gc", "--older-than", "9d", "--max-size", "1G") == (
        0,
        [
            "removed output/sft/tiny of 2026-01-01 12:00",
            "removed output/sft/tiny of 2026-01-02 12:00",
            "2 results removed, 1 B; 2 left",
        ],
    )
    shutil.rmtree("output/sft")
    assert run("gc", "--max-size", "0")[1][-1] == "2 results removed, 11 B; 0 left"


def test_damaged_results_are_found(cache):
    assert run("verify") == (0, ["4 results: all as recorded"])
    folder = cache.entries()[1].folder
    (folder / "model").write_text("y")
    line = f"{folder}: model has other content"
    assert run("verify", "--cache", "output/.cache") == (1, [line, "4 results: 1 damaged"])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("list", "output/sft/none"), "no version of output/sft/none in output/.cache"),
        (("verify", "--cache", "nowhere"), "nowhere does not exist: set --cache"),
        (("gc",), "gc needs --max-size, --older-than or both"),
        (("gc", "--max-size", "much"), "'much' is not a size: write a number and K, M, G or T,"),
        (("gc", "--older-than", "90"), "'90' is not an age: write a number of days, such as 90d"),
    ],
)
def test_mistakes_are_one_line(cache, arguments, error):
    code, [line] = run(*arguments)
    assert code == 1 and line.startswith(f"error: {error}")
    assert len(cache.entries()) == 4
