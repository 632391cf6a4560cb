"""What determines a result, which results on disk are stale, and why."""

import json
import shutil
from pathlib import Path

import pytest

from conftest import ROOT
from snakechat.jobs.data_jobs import Description
from snakechat.jobs.rules import Rule
from snakechat.jobs.stale_causes import lacking_configfiles, spec_changes
from snakechat.jobs.staleness import Specs, Staleness, write_spec
from snakechat.workflow.errors import InputError
from snakechat.workflow.links import link_result
from snakechat.workflow.manifest import (
    STORE,
    manifest_path,
    merge_lineages,
    read_manifest,
    recorded_inputs,
    result_files,
    sealed_json,
    store_key,
    without_names,
)
from support.configs import load
from support.specs import EMPTY_SPEC, specs_of_rules

# --- specs --------------------------------------------------------------------------------------


def test_the_code_of_a_spec_has_the_reward_functions_of_its_settings(tmp_path):
    description = Description({"reward_functions": {"mine": 1}})
    rules = {"train": Rule(lambda config, name: description, "models/train", program="tool")}
    specs = specs_of_rules(tmp_path, ["tool"], rules)
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards/mine.py").write_text("WORDS = []\n")
    spec, _ = specs.spec("train", "a")
    assert spec["code"].keys() == {"tool.py", "rewards/mine.py"}


def test_a_damaged_spec_file_is_written_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = {"rule": "train", "name": "sft/a", "settings": {"rate": 1}}
    path = Path(write_spec(spec))
    path.write_text(path.read_text().replace("rate", "other", 1))
    assert write_spec(spec) == str(path)
    assert json.loads(path.read_text()) == spec


def test_a_sweep_over_placements_has_a_training_of_each():
    over = {"placement": ["cpu", "multi_node"], "learning_rate": [0.1]}
    sweep = {"stage": "sft", "recipe": "tiny", "over": over}
    specs = Specs(load({"sweeps": {"mine": sweep}}), ROOT)
    names = [f"mine-placement-{each}-learning_rate-0.1" for each in over["placement"]]
    trained = [without_names(specs.spec("train_sft", name)[0]) for name in names]
    assert [spec.pop("placement") for spec in trained] == over["placement"]
    tokens = [without_names(specs.spec("tokenize_sft", name)[0]) for name in names]
    assert tokens[0] == tokens[1] and trained[0] == trained[1]


# --- results on disk ----------------------------------------------------------------------------


@pytest.fixture
def specs(tmp_path, monkeypatch):
    """Specs of `first`, and of `second`, which reads it. Both are built."""
    monkeypatch.chdir(tmp_path)
    specs = specs_of_rules(tmp_path, ("first", "second", "third"), {})
    describe(specs, "first")
    describe(specs, "second", inputs={"first": ("first", "a")})
    build(specs, "first")
    build(specs, "second")
    return specs


def describe(specs, rule, inputs=None, shows_provenance=False, **settings):
    """Describe the job `a` of a rule, by default with the inputs that it has."""
    if inputs is None and rule in specs.rules:
        inputs = specs.describe(rule, "a").inputs
    description = Description(settings, inputs or {})
    specs.rules[rule] = Rule(
        lambda config, name: description, rule, shows_provenance=shows_provenance
    )
    specs.describe.cache_clear()
    specs.spec.cache_clear()


def build(specs, rule, text=None):
    """Write a result into the store and link its path to it, as a program does."""
    spec, _ = specs.spec(rule, "a")
    result = Path("build")
    result.mkdir()
    (result / "rows.txt").write_text(text or rule)
    upstream = {
        key: read_manifest(manifest_path(entry["path"])) for key, entry in spec["inputs"].items()
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


def decided(specs, *rules, reporting=False):
    """Return the Staleness of the results of these rules."""
    staleness = Staleness(specs)
    staleness.reporting = reporting
    for rule in rules:
        staleness.decide(rule, "a")
    return staleness


def stale(specs, *rules):
    """Return which results of these rules are stale."""
    return set(decided(specs, *rules).stale)


def delete(specs, rule):
    """Delete a result, its earlier versions and the path that leads to it."""
    path = specs.result(rule, "a")
    shutil.rmtree(STORE / rule)
    Path(path).unlink()
    manifest_path(path).unlink()


def rebuild_first(specs, setting, text="first"):
    """Build `first` from another spec, with this text."""
    describe(specs, "first", setting=setting)
    build(specs, "first", text)


SECOND = {"output/second/a"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda result: (result / "rows.txt").unlink(),
        lambda result: (result / "rows.txt").write_text("longer than before"),
        lambda result: (result / "manifest.json").write_text("{"),
    ],
)
def test_a_damaged_result_is_stale(specs, damage):
    assert stale(specs, "first", "second") == set()
    damage(Path("output/second/a"))
    assert stale(specs, "first", "second") == SECOND


@pytest.mark.parametrize(
    ("text", "shows_provenance", "expected"),
    [("other", False, SECOND), ("first", False, set()), ("first", True, SECOND)],
)
def test_a_result_is_stale_if_its_input_was_rebuilt_with_other_content(
    specs, text, shows_provenance, expected
):
    describe(specs, "second", shows_provenance=shows_provenance)
    build(specs, "second")
    rebuild_first(specs, 1, text)
    assert stale(specs, "second") == expected


def test_a_missing_input_makes_a_result_stale_if_it_would_be_made_from_another_spec(specs):
    delete(specs, "first")
    assert stale(specs, "second") == set()
    describe(specs, "first", setting=1)
    assert stale(specs, "second") == SECOND


def test_a_missing_input_whose_own_input_has_other_content_makes_a_result_stale(specs):
    describe(specs, "third", inputs={"second": ("second", "a")})
    build(specs, "third")
    delete(specs, "second")
    assert stale(specs, "third") == set()
    rebuild_first(specs, 0, "other")
    assert stale(specs, "third") == {"output/third/a"}


def test_an_earlier_version_is_up_to_date_and_is_linked(specs):
    results = [Path("output/first/a"), Path("output/second/a")]
    versions = [result.resolve() for result in results]
    rebuild_first(specs, 1, "other")
    build(specs, "second")
    describe(specs, "first")
    staleness = decided(specs, "first", "second")
    assert not staleness.stale and len(staleness.links) == 2
    with pytest.raises(InputError, match="output/first/a is stale, and a report shows"):
        decided(specs, "first", reporting=True)
    staleness.link()
    assert [result.resolve() for result in results] == versions
    assert not decided(specs, "first", "second", reporting=True).stale


def test_a_folder_without_its_manifest_is_incomplete(specs):
    manifests = ["output/first/a.manifest.json", "output/second/a.manifest.json"]
    staleness = Staleness(specs)
    staleness.decide_folder("output/second/a", manifests)
    assert not staleness.incomplete
    Path(manifests[1]).unlink()
    staleness.decide_folder("output/second/a", manifests)
    assert staleness.incomplete == {"output/second/a": manifests[1:]}
    staleness.reporting = True
    with pytest.raises(InputError, match="output/second/a is incomplete"):
        staleness.decide_folder("output/second/a", manifests)


# --- causes -------------------------------------------------------------------------------------

ONE, TWO = "1" * 64, "2" * 64
OLD_FILES = {"train_sft.py": ONE, "snakechat/a.py": ONE, "snakechat/b.py": ONE}
NEW_FILES = {"train_sft.py": TWO, "snakechat/a.py": ONE, "snakechat/c.py": ONE}
OF_FILES = ["snakechat/b.py was removed", "snakechat/c.py was added", "train_sft.py changed"]


@pytest.mark.parametrize(
    ("part", "old", "new", "expected"),
    [
        ("settings", {"a": 1, "b": [1, 2]}, {"b": [1, 2], "a": 1}, []),
        ("settings", {"a": 1}, {"a": 1.0}, ["a changed from 1 to 1.0"]),
        ("settings", {"a": None}, {}, ["a was removed: null"]),
        ("settings", {}, {"a": {"b": 0.5, "c": {}}}, ["a.b was added: 0.5", "a.c was added: {}"]),
        # Specs have it only if it is true.
        ("deterministic", None, True, ["deterministic changed from false to true"]),
        ("code", OLD_FILES, NEW_FILES, OF_FILES),
        (
            "inputs",
            # Recorded specs have no names.
            {"model": {"rule": "init_model"}},
            {"model": {"rule": "fetch_model", "name": "opt", "path": "b"}},
            ['input model changed from "init_model" to "fetch_model"'],
        ),
        # A result of another rule has one change.
        ("rule", "fetch_model", "init_model", ["was made by fetch_model before"]),
    ],
)
def test_the_parts_of_a_spec_are_compared_by_value(part, old, new, expected):
    before, after = (
        EMPTY_SPEC | {"rule": "train_sft"} | ({} if value is None else {part: value})
        for value in (old, new)
    )
    assert spec_changes(before, after) == expected


def test_a_forgotten_config_file_is_named_however_a_command_spells_the_others(tmp_path):
    words = ["--configfile=mine.yaml", "--config", "seed=3", "--configfile", "/a/run/more.yaml"]
    (tmp_path / "run.json").write_text(sealed_json({"spec": "", "options": {"snakemake": words}}))
    (tmp_path / "link.yaml").symlink_to("more.yaml")
    for more in (Path("../run/more.yaml"), tmp_path / "link.yaml"):
        assert lacking_configfiles(tmp_path, [more]) == [
            "it was built with --configfile mine.yaml, which this command lacks"
        ]
        assert lacking_configfiles(tmp_path, [more, Path("mine.yaml")]) == []
