"""Staleness of results on disk: each state of a result by itself."""

import shutil
from pathlib import Path

import pytest

from snakechat.jobs.descriptions import Description
from snakechat.jobs.rules import Rule
from snakechat.jobs.staleness import Staleness
from snakechat.workflow.digests import sealed_json
from snakechat.workflow.errors import InputError
from snakechat.workflow.links import link_result
from snakechat.workflow.manifest import (
    STORE,
    manifest_path,
    merge_lineages,
    read_manifest,
    recorded_inputs,
    result_files,
    store_key,
    without_names,
)
from support.specs import specs_of_rules


@pytest.fixture
def specs(tmp_path, monkeypatch):
    """Specs of `first`, and of `second`, which reads it."""
    monkeypatch.chdir(tmp_path)
    specs = specs_of_rules(tmp_path, ("first", "second", "third"), {})
    describe(specs, "first")
    describe(specs, "second", inputs={"first": ("first", "a")})
    build(specs, "first", tmp_path)
    build(specs, "second", tmp_path)
    return specs


def describe(specs, rule, inputs=None, shows_provenance=False, **settings):
    """Describe the job `a` of a rule, by default with the inputs that it has."""
    if inputs is None and rule in specs.rules:
        inputs = specs.describe(rule, "a").inputs
    description = Description(settings, inputs or {})
    specs.rules[rule] = Rule(
        lambda config, name: description, rule, rule, shows_provenance=shows_provenance
    )
    specs.describe.cache_clear()
    specs.spec.cache_clear()


def build(specs, rule, root, text=None):
    """Write a result into the store and link its path to it, as a program does."""
    spec, _ = specs.spec(rule, "a")
    result = root / "build"
    result.mkdir()
    (result / "rows.txt").write_text(text or rule)
    upstream = {
        key: read_manifest(manifest_path(root / entry["path"]))
        for key, entry in spec["inputs"].items()
    }
    inputs = recorded_inputs(spec, upstream)
    manifest = {
        "spec": without_names(spec),
        "inputs": inputs,
        "lineage": merge_lineages(upstream.values()),
        "facts": {},
        "files": result_files(result),
    }
    (result / "manifest.json").write_text(sealed_json(manifest))
    key = store_key(spec, {name: entry["digest"] for name, entry in inputs.items()})
    folder = STORE / rule / key
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    result.rename(folder)
    link_result(spec["path"], folder)


def stale(specs, *rules, reporting=False):
    """Return which results of these rules are stale."""
    staleness = Staleness(specs)
    if reporting:
        staleness.reporting = True
    for rule in rules:
        staleness.decide(rule, "a")
    return set(staleness.stale)


def delete(specs, rule):
    """Delete a result, its earlier versions and the path that leads to it."""
    path = specs.result(rule, "a")
    shutil.rmtree(STORE / rule)
    Path(path).unlink()
    manifest_path(path).unlink()


SECOND = {"output/second/a"}


@pytest.mark.parametrize("damage", ["missing", "longer", "unreadable", "other spec"])
def test_a_damaged_result_is_stale(specs, tmp_path, damage):
    manifest = tmp_path / "output/second/a/manifest.json"
    if damage == "missing":
        (tmp_path / "output/second/a/rows.txt").unlink()
    elif damage == "longer":
        (tmp_path / "output/second/a/rows.txt").write_text("longer than before")
    elif damage == "unreadable":
        manifest.write_text("{")
    else:
        describe(specs, "second", rate=1)
    assert stale(specs, "first") == set()
    assert stale(specs, "first", "second") == SECOND


def rebuild_first(specs, root, setting, text="first"):
    """Build `first` from another spec, with this text."""
    describe(specs, "first", setting=setting)
    build(specs, "first", root, text)


@pytest.mark.parametrize(
    ("text", "shows_provenance", "expected"),
    [("other", False, SECOND), ("first", False, set()), ("first", True, SECOND)],
)
def test_a_result_is_stale_if_its_input_was_rebuilt_with_other_content(
    specs, tmp_path, text, shows_provenance, expected
):
    describe(specs, "second", shows_provenance=shows_provenance)
    build(specs, "second", tmp_path)
    rebuild_first(specs, tmp_path, 1, text)
    assert stale(specs, "second") == expected


def test_a_missing_input_makes_a_result_stale_if_it_would_be_made_from_another_spec(specs):
    delete(specs, "first")
    assert stale(specs, "second") == set()
    describe(specs, "first", setting=1)
    assert stale(specs, "second") == SECOND


def test_a_missing_input_whose_own_input_has_other_content_makes_a_result_stale(specs, tmp_path):
    describe(specs, "third", inputs={"second": ("second", "a")})
    build(specs, "third", tmp_path)
    delete(specs, "second")
    assert stale(specs, "third") == set()
    rebuild_first(specs, tmp_path, 0, "other")
    assert stale(specs, "third") == {"output/third/a"}


def test_an_earlier_version_is_up_to_date_and_is_linked(specs, tmp_path):
    first, second = Path("output/first/a").resolve(), Path("output/second/a").resolve()
    rebuild_first(specs, tmp_path, 1, "other")
    build(specs, "second", tmp_path)
    describe(specs, "first")
    staleness = Staleness(specs)
    for rule in ("first", "second"):
        staleness.decide(rule, "a")
    assert not staleness.stale and len(staleness.links) == 2
    staleness.link()
    assert Path("output/first/a").resolve() == first
    assert Path("output/second/a").resolve() == second
    assert stale(specs, "first", "second", reporting=True) == set()


def test_a_report_rejects_an_earlier_version(specs, tmp_path):
    rebuild_first(specs, tmp_path, 1, "other")
    describe(specs, "first")
    with pytest.raises(InputError, match="output/first/a is stale, and a report shows"):
        stale(specs, "first", reporting=True)


def test_a_folder_without_its_manifest_is_incomplete(specs, tmp_path):
    manifests = ["output/first/a.manifest.json", "output/second/a.manifest.json"]
    staleness = Staleness(specs)
    staleness.decide_folder("output/second/a", manifests)
    assert not staleness.incomplete
    (tmp_path / manifests[1]).unlink()
    staleness.decide_folder("output/second/a", manifests)
    assert staleness.incomplete == {"output/second/a": manifests[1:]}
    staleness.reporting = True
    with pytest.raises(InputError, match="output/second/a is incomplete"):
        staleness.decide_folder("output/second/a", manifests)
