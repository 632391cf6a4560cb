"""Snakemake's command line: what its options say and which have no effect here, what it prints."""

import argparse
import contextlib
import io
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from snakemake.common.configfile import load_configfile
from snakemake.exceptions import CliException
from snakemake.logging import logger
from snakemake.utils import update_config
from snakemake_interface_logger_plugins.common import LogEvent

from snakechat.workflow.digests import Identity, file_identity
from snakechat.workflow.errors import InputError
from snakechat.workflow.printable import printable_line

# --- options ----------------------------------------------------------------------------------


def threads_option(workflow: Any, rule: str) -> int | None:
    """Return the threads that --set-threads gives to the jobs of a rule, None without a number."""
    resource = workflow.resource_settings.overwrite_threads.get(rule)
    threads = getattr(resource, "raw", None)
    return threads if isinstance(threads, int) else None


def config_options(arguments: list[str] | None = None) -> list[str]:
    """Return the words of the command line that change the config: --configfile and --config.

    A rebuild needs them again.
    """
    words = sys.argv[1:] if arguments is None else arguments
    options, kept = [], False
    for word in words:
        if word.startswith("-"):
            kept = word.partition("=")[0] in ("--configfile", "--configfiles", "--config", "-C")
        if kept:
            options.append(word)
    return options


def parse_options(words: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Parse options of Snakemake, on the command line and in its profiles.

    Returns:
        The options, and the values of --config, which are text below the top level.

    Raises:
        InputError: An option selects jobs by something else than what is stale.
    """
    # It takes seconds, and is here for programs that do not run in Snakemake.
    from snakemake.cli import parse_args, parse_config

    with contextlib.redirect_stderr(io.StringIO()) as messages:
        try:
            _, options = parse_args(words)
            config = parse_config(options.config)
        except (ValueError, CliException) as error:
            raise InputError(str(error)) from None
        except SystemExit:
            *_, last = messages.getvalue().splitlines()
            raise InputError(last.rpartition("error: ")[2]) from None
    for name in ("force", "forceall", "forcerun", "until", "omit_from", "batch"):
        if getattr(options, name):
            option = name.replace("_", "-")
            raise InputError(f"--{option} has no effect here: the jobs are those that are stale")
    return options, config


def read_config(files: Iterable[Path], command_line: dict[str, Any]) -> dict[str, Any]:
    """Return the values of config files, later ones on top, as Snakemake reads them."""
    values: dict[str, Any] = {}
    for file in files:
        update_config(values, load_configfile(file))
    update_config(values, command_line)
    return values


# Options that take the manifest of a result for the whole result, or times for what makes it stale,
# by their names in Snakemake, and what to run instead.
_LISTING = "python scripts/explain.py, or snakemake -n"
_DELETION = "make clean-output, or delete folders below output/"
REFUSED = {
    **dict.fromkeys(("summary", "detailed_summary", "list_changes"), _LISTING),
    **dict.fromkeys(("list_input_changes", "list_params_changes"), _LISTING),
    **dict.fromkeys(("delete_all_output", "delete_temp_output"), _DELETION),
    "list_untracked": "python scripts/store.py list",
    "generate_unit_tests": "make reproduce TARGET=output/...",
    "touch": "python scripts/accept.py TARGET --because REASON, if code or libraries changed",
    "cache": "the same command without it: the store keeps all versions of results",
}


def check_options(workflow: Any) -> bool:
    """Return whether Snakemake writes a report, at the first question of its plan.

    Raises:
        InputError: An option would leave results in a wrong state, or say what is wrong of them.
    """
    if workflow.workflow_settings.cache is not None:
        raise _refused("cache")
    if workflow.execution_settings is not None:
        if workflow.touch:
            raise _refused("touch")
        return False
    # Snakemake's API has no settings of options that execute nothing.
    from snakemake.cli import parse_args

    with contextlib.redirect_stderr(io.StringIO()):
        try:
            _, options = parse_args(sys.argv[1:])
        except (SystemExit, ValueError, CliException):
            # Another program uses the API.
            return False
    for name in REFUSED:
        if getattr(options, name, None):
            raise _refused(name)
    return options.report is not None


def _refused(name: str) -> InputError:
    return InputError(
        f"--{name.replace('_', '-')} looks at manifests and times, and not at the files and specs"
        f" of results: run {REFUSED[name]}"
    )


# --- messages ---------------------------------------------------------------------------------


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
    # Progress bars return to the start of their line, which is read as a line feed.
    texts = [shown for line in text.split("\n") if (shown := line.strip())]
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
