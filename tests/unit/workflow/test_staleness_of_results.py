"""Staleness of results on disk, as file times: each state of a result by itself."""

import json
import os

import pytest

from snakechat.workflow.digests import file_digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import result_files
from snakechat.workflow.specs import Specs
from snakechat.workflow.staleness import STALE, Staleness


@pytest.fixture
def specs(tmp_path, monkeypatch):
    """Specs of `first`, and of `second`, which reads it and has a page."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").mkdir()
    for name in ("first", "second"):
        (tmp_path / f"scripts/{name}.py").write_text("")
    (tmp_path / "requirements.txt").write_text("numpy==1\n")
    specs = Specs(tmp_path)
    specs.describe("first", folder="first", settings=lambda name: {})
    specs.describe(
        "second",
        folder="second",
        settings=lambda name: {},
        inputs=lambda name: {"first": ("first", name)},
    )
    build(specs, "first", tmp_path)
    build(specs, "second", tmp_path)
    (tmp_path / "output/second/a.html").write_text("A page.")
    return specs


def build(specs, rule, root, seconds=10**6):
    """Write a result and its manifest, as a program does."""
    spec, _ = specs.spec(rule, "a")
    result = root / spec["path"]
    result.mkdir(parents=True, exist_ok=True)
    (result / "rows.txt").write_text(rule)
    manifest = {
        "spec": spec,
        "inputs": {
            key: file_digest(root / f"{upstream['path']}.manifest.json")
            for key, upstream in spec["inputs"].items()
        },
        "lineage": {},
        "facts": {},
        "files": result_files(result),
    }
    path = root / f"{spec['path']}.manifest.json"
    path.write_text(json.dumps(manifest))
    os.utime(path, (seconds, seconds))


def times(specs, root, reporting=False):
    """Return the times of both manifests and of the page after planning, in ns."""
    spec_file = Staleness(specs, {"second": ".html"}, reporting).spec_file("second", "a")
    paths = ["first/a.manifest.json", "second/a.manifest.json", "second/a.html"]
    files = [root / "output" / path for path in paths]
    newest = os.stat(root / spec_file).st_mtime_ns
    return [path.stat().st_mtime_ns if path.exists() else None for path in files], newest


def test_a_result_that_is_up_to_date_is_as_new_as_its_spec_and_its_inputs(specs, tmp_path):
    (first, second, page), newest = times(specs, tmp_path)
    assert second == page >= max(first, newest)
    # A further plan changes nothing.
    assert times(specs, tmp_path)[0] == [first, second, page]


@pytest.mark.parametrize("damage", ["missing", "longer", "unreadable", "other spec"])
def test_a_damaged_result_and_its_page_are_old(specs, tmp_path, damage):
    manifest = tmp_path / "output/second/a.manifest.json"
    if damage == "missing":
        (tmp_path / "output/second/a/rows.txt").unlink()
    elif damage == "longer":
        (tmp_path / "output/second/a/rows.txt").write_text("longer than before")
    elif damage == "unreadable":
        manifest.write_text("{")
    else:
        specs.describe("second", "second", lambda name: {"rate": 1}, specs.rules["second"].inputs)
        specs.spec.cache_clear()
    (first, second, page), _ = times(specs, tmp_path)
    assert second == page == STALE < first


def test_a_result_is_stale_if_its_input_was_rebuilt_with_other_content(specs, tmp_path):
    manifest = tmp_path / "output/first/a.manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"facts": {"rows": 1}}))
    (_, second, _), _ = times(specs, tmp_path)
    assert second == STALE


def test_a_missing_input_leaves_a_result_up_to_date(specs, tmp_path):
    (tmp_path / "output/first/a.manifest.json").unlink()
    (_, second, _), newest = times(specs, tmp_path)
    assert second >= newest


def test_a_report_rejects_a_stale_result(specs, tmp_path):
    times(specs, tmp_path, reporting=True)
    (tmp_path / "output/second/a/rows.txt").unlink()
    with pytest.raises(InputError, match="output/second/a is stale, and a report shows"):
        times(specs, tmp_path, reporting=True)


def test_a_report_rejects_an_incomplete_result(specs):
    staleness = Staleness(specs, {}, reporting=True)
    with pytest.raises(InputError, match="output/sft/a is incomplete"):
        staleness.require_report_input("output/sft/a", complete=False)
    Staleness(specs, {}, reporting=False).require_report_input("output/sft/a", complete=False)
