"""What Snakemake prints of a build, and what it prints no longer."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snakemake.logging import logger
from snakemake_interface_logger_plugins.common import LogEvent

from snakechat.workflow.printable import printable_line


def hide_messages(workflow: Any) -> None:
    """Drop messages of Snakemake that do not apply.

    Its plan did not expect the folders that users ask for, and it has no metadata of them, because
    an upstream job wrote them and their own rule has no command. What it advises for stale results
    (--rerun-triggers, --cleanup-metadata) has no effect (`decide_staleness`).
    """
    workflow.log_missing_metadata_info = workflow.log_provenance_info = lambda: None

    def is_wanted(record: logging.LogRecord) -> bool:
        return "were not present when the DAG was created" not in record.getMessage()

    logger.addFilter(is_wanted)


def repeat_errors() -> None:
    """Have a failed build end with the errors of its jobs, and print each command once.

    Each error is the last line of a job's log.
    """
    errors: dict[str, None] = {}

    def shorten(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if text.startswith("RuleException:\nCalledProcessError"):
            # The message about the job has the same command.
            return False
        if getattr(record, "event", None) == LogEvent.JOB_ERROR:
            # A cluster's plugin says how the job ended, and where its log is.
            message = getattr(record, "rule_msg", None)
            error = _last_line(getattr(record, "log", ()), message)
            errors[error] = None
            record.__dict__["rule_msg"] = message or error
        if errors and text.startswith("WorkflowError:\nAt least one job did not complete"):
            record.msg, record.args = "\n".join(errors), ()
        return True

    logger.addFilter(shorten)


# The start of the stack of an exception of Python.
TRACEBACK = "Traceback (most recent call last):"


def _last_line(logs: Sequence[str], message: str | None) -> str:
    """Return the error of a job, which is the last line of its first log.

    A job that is killed, for example by the kernel because memory is exhausted, writes none; nor
    does one that a cluster did not accept.

    Args:
        logs: The paths of its logs.
        message: What a cluster's plugin says about the job, if there is one.
    """
    try:
        text = Path(logs[0]).read_text(errors="replace")
    except (IndexError, OSError):
        text = ""
    # Progress bars return to the start of their line.
    texts = [shown for line in text.split("\n") if (shown := line.rpartition("\r")[2].strip())]
    has_error = texts and (texts[-1].startswith(("error: ", "stopped by ")) or TRACEBACK in text)
    if not has_error and message:
        return f"error: {printable_line(message.strip())}"
    if not has_error:
        return (
            "error: a job was killed before it could say why, by a person, a limit of a cluster, or"
            f" the kernel when memory ran out: {', '.join(logs)}"
        )
    return printable_line(texts[-1])
