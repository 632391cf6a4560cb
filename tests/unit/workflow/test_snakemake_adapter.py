"""Which Snakemake a build accepts, and what happens at its end."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from snakechat.workflow.errors import InputError
from snakechat.workflow.snakemake_adapter import (
    after_build,
    before_report,
    check_path,
    check_version,
)


@pytest.mark.parametrize("version", ["8.30.0", "90.1"])
def test_other_versions_than_9_are_rejected(version):
    check_version("9.27.1")
    with pytest.raises(InputError, match=f"Snakemake {version} is installed"):
        check_version(version)


def test_a_report_is_recognized_wherever_its_option_is():
    done = []
    workflow = SimpleNamespace(create_report=lambda plugin, **_: done.append(plugin))
    before_report(workflow, lambda: done.append("before"))
    assert not done
    workflow.create_report("html", report_settings=None)
    assert done == ["before", "html"]


@pytest.mark.parametrize(
    ("arguments", "workflow", "expected"),
    [
        ([], {}, ["build", "finish"]),
        ([], {"dryrun": True}, ["build"]),
        ([], {"is_main_process": False}, ["build"]),
        (["--report-after-run"], {}, ["build", "report", "finish"]),
    ],
)
def test_a_build_is_finished_at_its_end(arguments, workflow, expected, monkeypatch):
    done = []
    monkeypatch.setattr("sys.argv", ["snakemake", *arguments])
    workflow = SimpleNamespace(
        **{"dryrun": False, "is_main_process": True, **workflow},
        execute=lambda updated_files: done.append("build"),
        create_report=lambda report: done.append("report"),
    )
    after_build(workflow, lambda: done.append("finish"))
    workflow.execute(updated_files=None)
    if arguments:
        workflow.create_report("html")
    assert done == expected


@pytest.mark.parametrize("name", ["{x}", "a{", "b}"])
def test_braces_in_the_path_of_a_project_are_rejected(name):
    check_path(Path("/my project/$(x)"))
    with pytest.raises(InputError, match="braces in a path"):
        check_path(Path("/work", name))
