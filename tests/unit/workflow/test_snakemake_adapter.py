"""What the workflow reads of Snakemake's command line and version."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from snakechat.workflow.errors import InputError
from snakechat.workflow.snakemake_adapter import (
    after_build,
    before_report,
    check_path,
    check_scheduler,
    check_version,
    config_options,
    jobs_run_here,
    repeat_errors,
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


@pytest.mark.parametrize(
    ("executor", "arguments", "expected"),
    [
        ("local", ["--cores", "1"], True),
        ("dryrun", ["-n"], True),
        ("dryrun", ["-n", "--profile", "slurm"], False),
        ("dryrun", ["-n", "--executor=kubernetes"], False),
        ("slurm", ["--profile", "slurm"], False),
    ],
)
def test_jobs_that_would_run_on_this_machine(executor, arguments, expected, monkeypatch):
    monkeypatch.delenv("SNAKEMAKE_PROFILE", raising=False)
    workflow = SimpleNamespace(executor_plugin=SimpleNamespace(name=executor))
    assert jobs_run_here(workflow, arguments) == expected


def test_the_last_error_of_a_build_repeats_those_of_its_jobs(tmp_path, monkeypatch):
    messages = logging.getLogger("test of messages")
    monkeypatch.setattr("snakechat.workflow.snakemake_adapter.logger", messages)
    repeat_errors()
    shown = []
    handler = logging.Handler()
    handler.emit = shown.append
    messages.addHandler(handler)
    (tmp_path / "a.log").write_text("import: 0%\rimport: 9%\nerror: row 1\n")
    stack = "Traceback (most recent call last):\n  File x\nZeroDivisionError: division\n"
    (tmp_path / "raised.log").write_text(stack)
    (tmp_path / "killed.log").write_text("train: 0%\rtrain: 9%\n77 % of the weights differ\n")
    failed = "WorkflowError:\nAt least one job did not complete successfully."
    messages.error(failed)
    for log, message in (
        *((f"{name}.log", None) for name in ("a", "raised", "killed", "missing")),
        ("a.log", "job 7 was cancelled"),
    ):
        messages.error("RuleException:\nCalledProcessError in file x:\nCommand 'y' returned 1")
        extra = {"event": LogEvent.JOB_ERROR, "rule_msg": message, "log": [str(tmp_path / log)]}
        messages.error("Error in rule", extra=extra)
    messages.error(failed)
    killed, missing = (
        "error: a job ended without a message, as if it was killed, for example because memory was"
        f" exhausted: {tmp_path}/{name}.log"
        for name in ("killed", "missing")
    )
    jobs = [record.rule_msg for record in shown[1:6]]
    assert jobs == [
        "error: row 1",
        "ZeroDivisionError: division",
        killed,
        missing,
        "job 7 was cancelled",
    ]
    assert shown[0].getMessage() == failed
    errors = ["error: row 1", "ZeroDivisionError: division", killed, missing]
    assert shown[6].getMessage() == "\n".join(errors)


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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["output/sft/tiny", "--cores", "1"], []),
        (
            ["output/sft/mine", "--configfile", "mine.yaml", "--cores", "2"],
            ["--configfile", "mine.yaml"],
        ),
        (
            ["--config", "seed=2", "language=zh", "--cores", "2", "--configfile=a.yaml"],
            ["--config", "seed=2", "language=zh", "--configfile=a.yaml"],
        ),
        (["-C", "seed=2", "-n"], ["-C", "seed=2"]),
    ],
)
def test_options_of_the_config_are_kept(arguments, expected):
    assert config_options(arguments) == expected
