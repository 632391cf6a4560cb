"""accept.py on a small build: results that a person declares equivalent."""

import json
import re
from pathlib import Path

import pytest

from accept import acceptable_changes
from conftest import edited
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import manifest_path, read_manifest, sealed_json

TARGET = "output/rlhf/tiny"
BECAUSE = "the refactoring | keeps\nall losses"
CHANGE = ('"loss": loss, ', '"loss": 0 + loss, ')


def accept(workflow, *options, target=TARGET):
    """Run accept.py."""
    command = ("python", "scripts/accept.py", target, "--because", BECAUSE)
    return workflow.run(*command, *workflow.options, *options)


def test_an_accepted_result_is_not_built_again_and_shows_the_reason(quick, tmp_path):
    workflow = quick.copy(tmp_path / "work")
    with edited(workflow.folder / "scripts/train_sft.py", CHANGE):
        # SFT was built for RLHF alone: it has no report.
        process = accept(workflow, target="output/sft/tiny")
        line = "train_sft tiny is accepted: train_sft.py changed\n"
        assert (process.returncode, process.stdout) == (0, line)
        # The report shows what results were made from.
        assert workflow.planned(TARGET) == {"draw_report"}
        workflow.build("output/report/sft/tiny")
    manifest = json.loads((workflow.folder / "output/sft/tiny.manifest.json").read_text())
    [entry] = manifest["accepted"]
    assert entry["because"] == "the refactoring | keeps all losses"
    assert entry["changes"] == ["train_sft.py changed"]
    record = json.loads((workflow.folder / "output/sft/tiny/run.json").read_text())
    assert record["spec"] == entry["from"] != entry["to"]
    page = (workflow.folder / "output/report/sft/tiny/report.html").read_text()
    assert "the refactoring | keeps all losses (train_sft.py changed)" in page
    process = workflow.run("python", "scripts/verify.py", "output/sft")
    line = (
        "output/sft/tiny: accepted on .* because the refactoring . keeps all losses: train_sft.py"
    )
    assert process.returncode == 0 and re.match(line, process.stdout)
    listing = ("python", "scripts/store.py", "list", "output/sft/tiny")
    assert "  current\n" in workflow.run(*listing).stdout


def test_changed_settings_cannot_be_accepted_and_without_changes_nothing_is(quick):
    before = (quick.folder / "output/sft/tiny.manifest.json").read_bytes()
    process = accept(quick, "--config", "sft={defaults: {weight_decay: 0.5}}")
    line = "error: train_sft tiny: only changes of code and .*: weight_decay changed from .* again$"
    assert process.returncode == 1 and re.match(line, process.stdout)
    assert (quick.folder / "output/sft/tiny.manifest.json").read_bytes() == before
    process = accept(quick)
    assert (process.returncode, process.stdout) == (0, f"{TARGET}: nothing to accept\n")


def test_results_that_are_damaged_or_have_another_input_cannot_be_accepted(
    quick, tmp_path, monkeypatch
):
    copy = quick.copy(tmp_path / "copy")
    monkeypatch.chdir(copy.folder)
    made = read_manifest(manifest_path("output/sft/tiny"))
    [path] = Path("output/specs/train_sft").glob("tiny-*.json")
    spec = json.loads(path.read_text())
    Path("output/sft/tiny/config.json").write_text("{}")
    with pytest.raises(InputError, match=r"^train_sft tiny: .*config.json has another size"):
        acceptable_changes(spec, [], made)
    tokens = Path("output/tokens/sft/tiny.manifest.json")
    manifest = read_manifest(tokens)
    manifest["files"]["stats.json"]["sha256"] = "0" * 64
    tokens.write_text(sealed_json(manifest))
    with pytest.raises(InputError, match=r"^train_sft tiny: .*tokenize_sft tiny was rebuilt"):
        acceptable_changes(spec, [], made)
