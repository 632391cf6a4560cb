"""Staleness of results on disk, as file times: each state of a result by itself."""

import json
import os

import pytest

from snakechat.workflow.errors import InputError
from snakechat.workflow.lineage import merge_lineages
from snakechat.workflow.manifest import input_digest, manifest_path, read_manifest, result_files
from snakechat.workflow.specs import Specs
from snakechat.workflow.staleness import STALE, Staleness


@pytest.fixture
def specs(tmp_path, monkeypatch):
    """Specs of `first`, and of `second`, which reads it and has a page."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").mkdir()
    for name in ("first", "second"):
        (tmp_path / f"scripts/{name}.py").write_text("")
    for lock in ("requirements.txt", "requirements-torch.txt"):
        (tmp_path / lock).touch()
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
            key: input_digest(spec, read_manifest(manifest_path(root / upstream["path"])))
            for key, upstream in spec["inputs"].items()
        },
        "lineage": merge_lineages(
            read_manifest(manifest_path(root / upstream["path"]))
            for upstream in spec["inputs"].values()
        ),
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


def rebuild_first(specs, root, setting, text="first"):
    """Rebuild `first` from another spec: with this text, and then with the spec of today."""
    specs.describe("first", "first", lambda name: {"setting": setting})
    specs.spec.cache_clear()
    build(specs, "first", root)
    (root / "output/first/a/rows.txt").write_text(text)
    manifest = read_manifest(root / "output/first/a.manifest.json")
    manifest["files"] = result_files(root / "output/first/a")
    (root / "output/first/a.manifest.json").write_text(json.dumps(manifest))


def test_a_result_is_stale_if_its_input_was_rebuilt_with_other_content(specs, tmp_path):
    rebuild_first(specs, tmp_path, 1, "other")
    (first, second, _), _ = times(specs, tmp_path)
    assert second == STALE < first


def test_a_result_stays_if_its_input_was_rebuilt_with_the_same_content(specs, tmp_path):
    rebuild_first(specs, tmp_path, 1)
    (first, second, _), _ = times(specs, tmp_path)
    assert second >= first


def test_a_result_that_shows_provenance_is_stale_if_its_input_was_rebuilt(specs, tmp_path):
    inputs = specs.rules["second"].inputs
    specs.describe("second", "second", lambda name: {}, inputs, shows_provenance=True)
    specs.spec.cache_clear()
    build(specs, "second", tmp_path)
    rebuild_first(specs, tmp_path, 1)
    (first, second, _), _ = times(specs, tmp_path)
    assert second == STALE < first


def test_a_missing_input_leaves_a_result_up_to_date(specs, tmp_path):
    (tmp_path / "output/first/a.manifest.json").unlink()
    (_, second, _), newest = times(specs, tmp_path)
    assert second >= newest


def test_a_missing_input_that_would_be_made_from_another_spec_makes_a_result_stale(specs, tmp_path):
    (tmp_path / "output/first/a.manifest.json").unlink()
    specs.describe("first", "first", lambda name: {"setting": 1})
    specs.spec.cache_clear()
    (_, second, _), _ = times(specs, tmp_path)
    assert second == STALE


def test_a_missing_input_whose_own_input_has_other_content_makes_a_result_stale(specs, tmp_path):
    specs.describe("third", "third", lambda name: {}, lambda name: {"second": ("second", name)})
    (tmp_path / "scripts/third.py").write_text("")
    build(specs, "third", tmp_path)
    (tmp_path / "output/second/a.manifest.json").unlink()
    third = tmp_path / "output/third/a.manifest.json"
    Staleness(specs, {}, False).spec_file("third", "a")
    assert third.stat().st_mtime_ns != STALE
    rebuild_first(specs, tmp_path, 0, "other")
    Staleness(specs, {}, False).spec_file("third", "a")
    assert third.stat().st_mtime_ns == STALE


def test_an_emptied_or_edited_spec_file_is_written_again(specs, tmp_path):
    path = tmp_path / Staleness(specs, {}, False).spec_file("second", "a")
    text = path.read_text()
    for damaged in ("", text.replace("second", "other", 1)):
        path.write_text(damaged)
        Staleness(specs, {}, False).spec_file("second", "a")
        assert path.read_text() == text


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
