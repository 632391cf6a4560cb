"""accept.py on a small build: results that a person declares equivalent."""

import json
from pathlib import Path

import pytest

from accept import acceptable_changes
from conftest import edited
from snakechat.workflow.errors import InputError

TARGET = "output/rlhf/tiny"
BECAUSE = "the refactoring | keeps\nall losses"
CHANGE = ("timer = StepTimer(device)", "timer = StepTimer(device=device)")


@pytest.fixture(scope="module")
def accepted(quick, tmp_path_factory):
    """A copy of the quick build whose training program was edited, and accepted; and the output."""
    workflow = quick.copy(tmp_path_factory.mktemp("accept") / "work")
    workflow.options = (*workflow.options, "--config", "shared_store=shared")
    with edited(workflow.folder / "scripts/train_sft.py", CHANGE):
        assert "train_sft" in workflow.planned(TARGET)
        process = accept(workflow)
        assert process.returncode == 0, process.stdout
        yield workflow, process.stdout


def accept(workflow, *options):
    """Run accept.py."""
    command = ("python", "scripts/accept.py", TARGET, "--because", BECAUSE)
    return workflow.run(*command, *workflow.options, *options)


def test_accepted_results_are_not_built_again(accepted):
    workflow, output = accepted
    assert output == "train_sft tiny is accepted: train_sft.py changed\n"
    # The report shows what results were made from.
    assert workflow.planned(TARGET) == {"draw_report"}


def test_an_accepted_result_is_in_the_shared_store(accepted):
    workflow, _ = accepted
    listing = ("python", "scripts/store.py", "list", "output/sft/tiny")
    process = workflow.run(*listing, "--store", "shared")
    assert process.returncode == 0 and "  current\n" in process.stdout
    # The result that was accepted stays, with the spec that it was made from.
    process = workflow.run(*listing)
    assert "    train_sft.py changed\n    the files are the same\n" in process.stdout


def test_the_reason_is_recorded(accepted):
    workflow, _ = accepted
    manifest = json.loads((workflow.folder / "output/sft/tiny.manifest.json").read_text())
    [entry] = manifest["accepted"]
    assert entry["because"] == "the refactoring | keeps all losses"
    assert entry["changes"] == ["train_sft.py changed"]
    assert entry["from"] != entry["to"]
    workflow.build("output/report/sft/tiny")
    page = (workflow.folder / "output/report/sft/tiny/report.html").read_text()
    assert "the refactoring | keeps all losses (train_sft.py changed)" in page


def test_verify_lists_accepted_results_and_finds_no_problem(accepted):
    workflow, _ = accepted
    process = workflow.run("python", "scripts/verify.py", "output/sft")
    assert process.returncode == 0
    line = process.stdout.splitlines()[0]
    assert line.startswith("output/sft/tiny: accepted on ")
    assert line.endswith("because the refactoring | keeps all losses: train_sft.py changed")


def test_changed_settings_cannot_be_accepted(quick):
    before = (quick.folder / "output/sft/tiny.manifest.json").read_bytes()
    process = accept(quick, "--config", "sft={defaults: {weight_decay: 0.5}}")
    assert process.returncode == 1
    assert process.stdout.startswith(
        "error: train_sft tiny: only changes of code and libraries can be accepted: weight_decay"
        " changed from"
    )
    assert process.stdout.endswith("build it again\n")
    assert (quick.folder / "output/sft/tiny.manifest.json").read_bytes() == before


@pytest.fixture
def copy(quick, tmp_path, monkeypatch):
    """A copy of the quick build, in its folder."""
    workflow = quick.copy(tmp_path / "copy")
    monkeypatch.chdir(workflow.folder)
    return workflow


def test_a_result_whose_input_was_rebuilt_with_other_content_cannot_be_accepted(copy):
    tokens = copy.folder / "output/tokens/sft/tiny.manifest.json"
    manifest = json.loads(tokens.read_text())
    manifest["files"]["stats.json"]["sha256"] = "0" * 64
    tokens.write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"^train_sft tiny: tokenize_sft tiny was rebuilt with"):
        acceptable_changes(copy.spec_of("output/sft/tiny"))


def test_a_damaged_result_cannot_be_accepted(copy):
    Path("output/sft/tiny/config.json").write_text("{}")
    with pytest.raises(InputError, match=r"^output/sft/tiny: config.json has another size: delete"):
        acceptable_changes(copy.spec_of("output/sft/tiny"))


def test_without_changes_there_is_nothing_to_accept(quick):
    process = accept(quick)
    assert (process.returncode, process.stdout) == (0, f"{TARGET}: nothing to accept\n")
