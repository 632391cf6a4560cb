"""What Snakemake prints of a build, and what it prints no longer."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from snakemake.logging import logger
from snakemake_interface_logger_plugins.common import LogEvent

from snakechat.workflow.digests import Identity, file_identity
from snakechat.workflow.printable import printable_line


def hide_messages(rules: set[str]) -> None:
    """Drop messages of Snakemake about these rules that do not apply.

    Its plan did not expect the folders that users ask for, and it has no metadata of them, because
    an upstream job wrote them and their own rule has no command. A failed job loses no output
    (snakechat.workflow.snakemake_adapter).
    """

    def is_wanted(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if text.startswith("MissingRuleException"):
            start = text.partition(" (if you use input functions")[0]
            record.msg, record.args = f"{start}: results are output/STAGE/RECIPE", ()
        if found := _OF_ONE_RULE.match(text):
            return found[1] not in rules
        if found := _OF_RULES.search(text):
            return not rules.issuperset(found[1].split())
        return True

    logger.addFilter(is_wanted)


# The rule that a message is about, and the rules.
_OF_ONE_RULE = re.compile(
    r"(?:Warning: the following output files of rule|Removing output files of failed job) (\w+)"
)
_OF_RULES = re.compile("Rules with (?:missing|outdated) metadata: (.*)")


def show_causes(stamps: Collection[str], causes: Callable[[str], str]) -> None:
    """Have Snakemake print why a job is stale.

    Args:
        stamps: The inputs that are newer than the output of each stale job.
        causes: Returns why an output is stale, or an empty string.
    """

    def explain(record: logging.LogRecord) -> bool:
        if getattr(record, "event", None) == LogEvent.JOB_INFO:
            shown = record.__dict__
            shown["input"] = [path for path in shown["input"] if path not in stamps]
            if any(stamp in shown["reason"] for stamp in stamps):
                found = "; ".join(filter(None, map(causes, shown["output"])))
                shown["reason"] = found or "Forced execution"
        return True

    logger.addFilter(explain)


def repeat_errors(out_of_memory: Counter[str]) -> None:
    """Have a failed build end with a line for each failed job, and print each command once.

    out_of_memory: How often jobs ran out of memory, by their logs. It is updated.
    """
    errors: dict[str, None] = {}
    # The logs as they were when their jobs started: an earlier run may have written them.
    before: dict[str, Identity | None] = {}

    def shorten(record: logging.LogRecord) -> bool:
        event = getattr(record, "event", None)
        if event == LogEvent.JOB_INFO:
            before.update((log, _identity(log)) for log in record.__dict__["log"])
        text = record.getMessage()
        if text.startswith("RuleException:\nCalledProcessError"):
            # The message about the job has the same command.
            return False
        if event == LogEvent.JOB_ERROR:
            # A cluster's plugin says how the job ended, and where its log is.
            message = getattr(record, "rule_msg", None)
            logs = list(getattr(record, "log", ()))
            is_of_run = bool(logs) and _identity(logs[0]) != before.get(logs[0])
            error = _error(logs, is_of_run, message)
            errors[f"{error} ({', '.join(logs[:1])})" if logs else error] = None
            # Snakemake would print None.
            record.__dict__["rule_msg"] = message or "the last lines of the build have the error"
            if logs and OUT_OF_MEMORY.search(f"{message} {error}"):
                out_of_memory[logs[0]] += 1
        if errors and text.startswith("WorkflowError:\nAt least one job did not complete"):
            record.msg, record.args = "\n".join(errors), ()
        return True

    logger.addFilter(shorten)


def _identity(path: str) -> Identity | None:
    """Return what a change of a file changes, or None if it does not exist."""
    try:
        return file_identity(Path(path))
    except OSError:
        return None


# What Slurm and Kubernetes say, and scripts/launch.py of a process that the kernel killed.
OUT_OF_MEMORY = re.compile("OUT_OF_MEMORY|OOMKilled|ended by SIGKILL")
# A line of the shell itself, for example of a program that it does not find.
OF_SHELL = re.compile(r"\S*sh: (line [0-9]+: )?\S+: ")
# The start of the stack of an exception of Python.
TRACEBACK = "Traceback (most recent call last):"


def _error(logs: Sequence[str], is_of_run: bool, message: str | None) -> str:
    """Return the error of a job, which is the last line of its first log.

    A job that is killed, for example by the kernel because memory is exhausted, writes none; nor
    does one that a cluster did not accept.

    Args:
        logs: The paths of its logs.
        is_of_run: Whether this run wrote the first one.
        message: What a cluster's plugin says about the job, if there is one.
    """
    try:
        text = Path(logs[0]).read_text(errors="replace") if is_of_run else ""
    except OSError:
        text = ""
    # Progress bars return to the start of their line.
    texts = [shown for line in text.split("\n") if (shown := line.rpartition("\r")[2].strip())]
    last = printable_line(texts[-1]) if texts else ""
    if last.startswith(("error: ", "stopped by ")) or TRACEBACK in text:
        return last
    if OF_SHELL.match(last):
        return f"error: {last}"
    if message:
        return f"error: {printable_line(message.strip())}"
    return (
        "error: a job was killed before it could say why, by a person, a limit of a cluster, or the"
        f" kernel when memory ran out: {', '.join(logs)}"
    )
