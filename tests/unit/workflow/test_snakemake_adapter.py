"""Which Snakemake, folders and clusters a build accepts, and what happens at its end."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from snakechat.workflow.errors import InputError
from snakechat.workflow.snakemake_adapter import (
    after_build,
    before_report,
    check_path,
    check_scheduler,
    check_version,
)


@pytest.mark.parametrize("version", ["9.27.1", "9.30.0"])
def test_versions_9_are_accepted(version):
    check_version(version)


@pytest.mark.parametrize("version", ["8.30.0", "10.0.0", "90.1"])
def test_other_versions_are_rejected(version):
    with pytest.raises(InputError, match=f"Snakemake {version} is installed"):
        check_version(version)


def test_jobs_for_slurm_need_its_command(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    slurm, local = (
        SimpleNamespace(executor_plugin=SimpleNamespace(name=name)) for name in ("slurm", "local")
    )
    check_scheduler(local)
    with pytest.raises(InputError, match="the command sbatch is not on PATH"):
        check_scheduler(slurm)
    (tmp_path / "sbatch").touch(mode=0o755)
    check_scheduler(slurm)


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
        ([], {"dryrun": True}, ["build", "preview"]),
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
    after_build(workflow, lambda: done.append("finish"), lambda: done.append("preview"))
    workflow.execute(updated_files=None)
    if arguments:
        workflow.create_report("html")
    assert done == expected


def test_a_report_alone_is_not_finished(monkeypatch):
    monkeypatch.setattr("sys.argv", ["snakemake", "--report"])
    done = []
    workflow = SimpleNamespace(execute=None, create_report=lambda: done.append("report"))
    after_build(workflow, lambda: done.append("finish"), lambda: done.append("preview"))
    workflow.create_report()
    assert done == ["report"]


@pytest.mark.parametrize("name", ["{x}", "a{", "b}"])
def test_braces_in_the_path_of_a_project_are_rejected(name):
    check_path(Path("/my project/$(x)"))
    with pytest.raises(InputError, match="braces in a path"):
        check_path(Path("/work", name))
