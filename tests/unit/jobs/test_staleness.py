"""What determines a result, which results on disk are stale, and why."""

import json
import shutil
from pathlib import Path

import pytest

from conftest import ROOT
from snakechat.jobs.data_jobs import Description
from snakechat.jobs.rules import Rule
from snakechat.jobs.stale_causes import lacking_configfiles, spec_changes
from snakechat.jobs.staleness import Jobs, with_upstream
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
from support.specs import EMPTY_SPEC, jobs_of_rules

# --- specs --------------------------------------------------------------------------------------


def test_the_code_of_a_spec_has_the_reward_functions_of_its_settings(tmp_path):
    description = Description({"reward_functions": {"mine": 1}})
    rules = {"train": Rule(lambda config, name: description, "models/train", program="tool")}
    jobs = jobs_of_rules(tmp_path, ["tool"], rules)
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards/mine.py").write_text("WORDS = []\n")
    assert jobs["train", "a"].spec["code"].keys() == {"tool.py", "rewards/mine.py"}


def test_only_a_damaged_spec_file_is_written_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Jobs(load(), ROOT)["split_dataset", "toy"]
    job.write_spec()
    before = job.spec_file.stat().st_ino
    job.write_spec()
    assert job.spec_file.stat().st_ino == before
    for _ in range(2):
        job.write_spec()
        assert json.loads(job.spec_file.read_text()) == job.spec
        job.spec_file.write_text(job.spec_file.read_text().replace("seed", "other", 1))


def test_a_sweep_over_placements_has_a_training_of_each():
    over = {"placement": ["cpu", "multi_node"], "learning_rate": [0.1]}
    sweep = {"stage": "sft", "recipe": "tiny", "over": over}
    jobs = Jobs(load({"sweeps": {"mine": sweep}}), ROOT)
    names = [f"mine-placement-{each}-learning_rate-0.1" for each in over["placement"]]
    trained = [without_names(jobs["train_sft", name].spec) for name in names]
    assert [spec.pop("placement") for spec in trained] == over["placement"]
    tokens = [without_names(jobs["tokenize_sft", name].spec) for name in names]
    assert tokens[0] == tokens[1] and trained[0] == trained[1]


def test_jobs_come_after_all_their_inputs():
    found = with_upstream([Jobs(load(), ROOT)["train_rlhf", "tiny"]])
    numbers = {job: number for number, job in enumerate(found)}
    assert all(numbers[each] < numbers[job] for job in found for each in job.inputs.values())


# --- results on disk ----------------------------------------------------------------------------


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """Jobs of `first`, and of `second`, which reads it. Both are built."""
    monkeypatch.chdir(tmp_path)
    jobs = jobs_of_rules(tmp_path, ("first", "second", "third"), {})
    describe(jobs, "first")
    describe(jobs, "second", inputs={"first": ("first", "a")})
    build(jobs, "first")
    build(jobs, "second")
    return jobs


def describe(jobs, rule, inputs=None, shows_provenance=False, **settings):
    """Describe the job `a` of a rule, by default with the inputs that it has."""
    if inputs is None and rule in jobs.rules:
        inputs = jobs[rule, "a"].description.inputs
    description = Description(settings, inputs or {})
    jobs.rules[rule] = Rule(
        lambda config, name: description, rule, shows_provenance=shows_provenance
    )
    jobs.clear()


def build(jobs, rule, text=None):
    """Write a result into the store and link its path to it, as a program does."""
    spec = jobs[rule, "a"].spec
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


def stale(jobs, *rules):
    """Return which of these rules have a result and none that is up to date."""
    jobs.clear()
    jobs.forget_results()
    return {rule for rule in rules if jobs[rule, "a"].is_stale}


def delete(jobs, rule):
    """Delete a result, its earlier versions and the path that leads to it."""
    path = jobs[rule, "a"].path
    shutil.rmtree(STORE / rule)
    Path(path).unlink()
    manifest_path(path).unlink()


def rebuild_first(jobs, setting, text="first"):
    """Build `first` from another spec, with this text."""
    describe(jobs, "first", setting=setting)
    build(jobs, "first", text)


def test_a_damaged_result_is_stale(jobs):
    assert stale(jobs, "first", "second") == set()
    Path("output/second/a/rows.txt").write_text("longer than before")
    assert stale(jobs, "first", "second") == {"second"}


def test_a_job_that_will_run_finds_that_an_input_has_other_bytes(jobs, capsys):
    describe(jobs, "second", setting=1)
    # Of the same size.
    Path("output/first/a/rows.txt").write_text("FIRST")
    assert stale(jobs, "second", "first") == {"second"}
    jobs.forget_results()
    jobs.will_run = True
    assert jobs["second", "a"].is_stale and jobs["first", "a"].is_stale
    assert "is damaged and is made again: rows.txt has other content" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "shows_provenance", "expected"),
    [("other", False, {"second"}), ("first", False, set()), ("first", True, {"second"})],
)
def test_a_result_is_stale_if_its_input_was_rebuilt_with_other_content(
    jobs, text, shows_provenance, expected
):
    describe(jobs, "second", shows_provenance=shows_provenance)
    build(jobs, "second")
    rebuild_first(jobs, 1, text)
    assert stale(jobs, "second") == expected


def test_a_missing_input_makes_a_result_stale_if_it_would_be_made_from_another_spec(jobs):
    delete(jobs, "first")
    assert stale(jobs, "second") == set()
    describe(jobs, "first", setting=1)
    assert stale(jobs, "second") == {"second"}


def test_a_missing_input_whose_own_input_has_other_content_makes_a_result_stale(jobs):
    describe(jobs, "third", inputs={"second": ("second", "a")})
    build(jobs, "third")
    delete(jobs, "second")
    assert stale(jobs, "third") == set()
    rebuild_first(jobs, 0, "other")
    assert stale(jobs, "third") == {"third"}


@pytest.mark.parametrize("shows_provenance", [True, False])
def test_beside_a_missing_input_the_others_count_as_always(jobs, shows_provenance):
    inputs = {"first": ("first", "a"), "second": ("second", "a")}
    describe(jobs, "third", inputs, shows_provenance)
    build(jobs, "third")
    delete(jobs, "second")
    rebuild_first(jobs, 1)
    assert stale(jobs, "third") == ({"third"} if shows_provenance else set())


def test_an_earlier_version_is_up_to_date(jobs):
    folder = jobs["first", "a"].result.folder
    rebuild_first(jobs, 1, "other")
    assert jobs["first", "a"].result.folder != folder
    describe(jobs, "first")
    assert jobs["first", "a"].result.folder == folder


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
