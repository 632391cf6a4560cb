"""What Snakemake prints of a build."""

import logging
from collections import Counter

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from snakechat.workflow.snakemake_cli import hide_messages, repeat_errors

MISSING = (
    "MissingRuleException:\nNo rule to produce sft/tiny (if you use input functions make sure that"
    " they don't raise unexpected exceptions)."
)


@pytest.fixture
def messages(monkeypatch):
    """A logger in place of Snakemake's, without handlers and filters."""
    logger = logging.Logger("test of messages")
    monkeypatch.setattr("snakechat.workflow.snakemake_cli.logger", logger)
    return logger


def fail(messages, log):
    """Log that a job failed; return the record as it is shown."""
    shown = []
    handler = logging.Handler()
    handler.emit = shown.append
    messages.addHandler(handler)
    messages.error("Error in rule", extra={"event": LogEvent.JOB_ERROR, "log": [str(log)]})
    messages.removeHandler(handler)
    return shown[0]


def test_a_target_without_a_rule_says_what_targets_are(messages):
    hide_messages(set())
    record = messages.makeRecord("x", logging.ERROR, "", 0, MISSING, (), None)
    assert messages.filter(record)
    assert record.getMessage().endswith(
        "No rule to produce sft/tiny: results are output/STAGE/RECIPE"
    )


def test_the_last_error_of_a_build_repeats_those_of_its_jobs(tmp_path, messages):
    out_of_memory = Counter()
    repeat_errors(out_of_memory)
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
        ("missing.log", "Job submission failed: no sbatch\n"),
        ("killed.log", "SLURM status is: 'OUT_OF_MEMORY'"),
    ):
        messages.error("RuleException:\nCalledProcessError in file x:\nCommand 'y' returned 1")
        extra = {"event": LogEvent.JOB_ERROR, "rule_msg": message, "log": [str(tmp_path / log)]}
        messages.error("Error in rule", extra=extra)
    messages.error(failed)
    killed, missing = (
        "error: a job was killed before it could say why, by a person, a limit of a cluster, or the"
        f" kernel when memory ran out: {tmp_path}/{name}.log"
        for name in ("killed", "missing")
    )
    # What a job printed is not repeated before the end.
    jobs = [record.rule_msg for record in shown[1:8]]
    assert jobs == [
        *["the last lines of the build have the error"] * 4,
        "job 7 was cancelled",
        "Job submission failed: no sbatch\n",
        "SLURM status is: 'OUT_OF_MEMORY'",
    ]
    assert shown[0].getMessage() == failed
    errors = {
        "a": "error: row 1",
        "raised": "ZeroDivisionError: division",
        "killed": killed,
        "missing": missing,
    }
    lines = [f"{error} ({tmp_path}/{name}.log)" for name, error in errors.items()]
    lines.append(f"error: Job submission failed: no sbatch ({tmp_path}/missing.log)")
    lines.append(f"error: SLURM status is: 'OUT_OF_MEMORY' ({tmp_path}/killed.log)")
    assert shown[8].getMessage() == "\n".join(lines)
    assert out_of_memory == {f"{tmp_path}/killed.log": 1}


def test_a_log_of_an_earlier_run_is_not_the_error_of_a_job(tmp_path, messages):
    log = tmp_path / "a.log"
    log.write_text("error: row 1\n")
    repeat_errors(Counter())
    extra = {"event": LogEvent.JOB_INFO, "log": [str(log)]}
    messages.info("Rule", extra=extra)
    failed = messages.makeRecord(
        "", 40, "", 0, "WorkflowError:\nAt least one job did not complete", (), None
    )
    fail(messages, log)
    log.write_text("/bin/bash: line 1: /x/python: No such file or directory\n")
    fail(messages, log)
    messages.filter(failed)
    killed, unknown = failed.getMessage().split("\n")
    assert "killed before it could say why" in killed
    assert unknown == f"error: /bin/bash: line 1: /x/python: No such file or directory ({log})"
