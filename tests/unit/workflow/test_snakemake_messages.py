"""What Snakemake prints of a build."""

import logging

from snakemake_interface_logger_plugins.common import LogEvent

from snakechat.workflow.snakemake_messages import repeat_errors


def test_the_last_error_of_a_build_repeats_those_of_its_jobs(tmp_path, monkeypatch):
    messages = logging.getLogger("test of messages")
    monkeypatch.setattr("snakechat.workflow.snakemake_messages.logger", messages)
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
        ("missing.log", "Job submission failed: no sbatch\n"),
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
    jobs = [record.rule_msg for record in shown[1:7]]
    assert jobs == [
        "error: row 1",
        "ZeroDivisionError: division",
        killed,
        missing,
        "job 7 was cancelled",
        "Job submission failed: no sbatch\n",
    ]
    assert shown[0].getMessage() == failed
    errors = ["error: row 1", "ZeroDivisionError: division", killed, missing]
    errors.append("error: Job submission failed: no sbatch")
    assert shown[7].getMessage() == "\n".join(errors)
