"""accept.py on a small build: results that a person declares equivalent."""

import json

import pytest

from conftest import edited

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
    assert output == "train_sft tiny is accepted: program train_sft.py changed\n"
    # The report shows what results were made from.
    assert workflow.planned(TARGET) == {"draw_report"}


def test_an_accepted_result_is_in_the_shared_store(accepted):
    workflow, _ = accepted
    listing = ("python", "scripts/store.py", "list", "output/sft/tiny")
    process = workflow.run(*listing, "--store", "shared")
    assert process.returncode == 0 and "  current\n" in process.stdout
    # The result that was accepted stays, with the spec that it was made from.
    process = workflow.run(*listing)
    assert "    program train_sft.py changed\n    the files are the same\n" in process.stdout


def test_the_reason_is_recorded(accepted):
    workflow, _ = accepted
    manifest = json.loads((workflow.folder / "output/sft/tiny.manifest.json").read_text())
    [entry] = manifest["accepted"]
    assert entry["because"] == "the refactoring | keeps all losses"
    assert entry["changes"] == ["program train_sft.py changed"]
    assert entry["from"] != entry["to"]
    workflow.build("output/report/sft/tiny")
    page = (workflow.folder / "output/report/sft/tiny/report.html").read_text()
    assert "the refactoring | keeps all losses (program train_sft.py changed)" in page


def test_verify_lists_accepted_results_and_finds_no_problem(accepted):
    workflow, _ = accepted
    process = workflow.run("python", "scripts/verify.py", "output/sft")
    assert process.returncode == 0
    line = process.stdout.splitlines()[0]
    assert line.startswith("output/sft/tiny: accepted on ")
    assert line.endswith("because the refactoring | keeps all losses: program train_sft.py changed")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--config", "sft={defaults: {weight_decay: 0.5}}"],
            "train_sft tiny: only changes of code and libraries can be accepted:"
            " sft.weight_decay changed from",
        ),
        (
            ["--config", "datasets={toy: {rows: 601}}"],
            "import_dataset toy: only changes of code and libraries can be accepted:"
            " datasets.toy.rows changed from",
        ),
    ],
)
def test_changed_settings_and_data_cannot_be_accepted(quick, options, message):
    before = (quick.folder / "output/sft/tiny.manifest.json").read_bytes()
    process = accept(quick, *options)
    assert process.returncode == 1
    assert process.stdout.startswith(f"error: {message}")
    assert process.stdout.endswith("build it again\n")
    assert (quick.folder / "output/sft/tiny.manifest.json").read_bytes() == before


def test_a_result_whose_input_was_rebuilt_with_other_content_cannot_be_accepted(quick, tmp_path):
    workflow = quick.copy(tmp_path / "copy")
    tokens = workflow.folder / "output/tokens/sft/tiny.manifest.json"
    manifest = json.loads(tokens.read_text())
    manifest["files"]["stats.json"]["sha256"] = "0" * 64
    tokens.write_text(json.dumps(manifest))
    with edited(workflow.folder / "scripts/train_sft.py", CHANGE):
        process = accept(workflow)
    assert process.returncode == 1
    assert process.stdout.startswith(
        "error: train_sft tiny: tokenize_sft tiny was rebuilt with other content"
    )


def test_a_damaged_result_cannot_be_accepted(quick, tmp_path):
    workflow = quick.copy(tmp_path / "copy")
    (workflow.folder / "output/sft/tiny/config.json").write_text("{}")
    with edited(workflow.folder / "scripts/train_sft.py", CHANGE):
        process = accept(workflow)
    assert process.returncode == 1
    damage = "output/sft/tiny: config.json has another size"
    assert f"{damage}: delete it and build it again" in process.stdout


def test_without_changes_there_is_nothing_to_accept(quick):
    process = accept(quick)
    assert (process.returncode, process.stdout) == (0, f"{TARGET}: nothing to accept\n")
