"""What a build takes from Snakemake: its names, its options, and what it prints."""

import logging
import shlex
from pathlib import Path

import pytest
from snakemake.api import SnakemakeApi
from snakemake_interface_logger_plugins.common import LogEvent

from snakechat.workflow.errors import InputError
from snakechat.workflow.snakemake_adapter import (
    REPLACED,
    REPLACED_ON_KUBERNETES,
    change_messages,
    check_names,
)
from snakechat.workflow.snakemake_options import config_options, parse_options, read_config


def test_a_snakemake_without_a_name_that_is_replaced_is_rejected():
    # Its module imports snakemake.workflow, which cannot be the first.
    assert SnakemakeApi
    names = REPLACED | REPLACED_ON_KUBERNETES
    assert len(names) <= 6
    check_names(names)
    for name in names:
        with pytest.raises(InputError, match=f"has no {name}s, and this workflow needs 9.27"):
            check_names([f"{name}s"])


# --- options ------------------------------------------------------------------------------------


def test_options_are_read_as_snakemake_reads_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("seed: 1\nsft: {defaults: {epochs: 1, lora_rank: 4}}\n")
    (tmp_path / "b.yaml").write_text("sft: {defaults: {epochs: 2}}\n")
    words = shlex.split("x y --configfile a.yaml b.yaml --config seed=3 'dpo={recipes: {}}'")
    options, config = parse_options([*words, "--directory", "there", "--cores", "2", "-n"])
    assert options.targets == ["x", "y"] and options.directory == Path("there")
    assert read_config(options.configfile, config) == {
        "seed": 3,
        "sft": {"defaults": {"epochs": 2, "lora_rank": 4}},
        "dpo": {"recipes": {}},
    }


def test_options_of_the_config_are_kept():
    words = ["output/sft/tiny", "--config", "seed=2", "language=zh", "-n", "--configfile=a.yaml"]
    kept = ["--config", "seed=2", "language=zh", "--configfile=a.yaml"]
    assert config_options(words) == kept
    assert config_options(["-C", "seed=2", "-n"]) == ["-C", "seed=2"]


# --- messages -----------------------------------------------------------------------------------


@pytest.fixture
def messages(monkeypatch):
    """A logger in place of Snakemake's, whose records are collected in `shown`."""
    logger = logging.Logger("test of messages")
    monkeypatch.setattr("snakechat.workflow.snakemake_adapter.logger", logger)
    logger.shown = []
    handler = logging.Handler()
    handler.emit = logger.shown.append
    logger.addHandler(handler)
    return logger


def fail(messages, log, message=None):
    """Log that a job failed; return the record as it is shown."""
    messages.error("RuleException:\nCalledProcessError in file x:\nCommand 'y' returned 1")
    extra = {"event": LogEvent.JOB_ERROR, "rule_msg": message, "log": [str(log)] if log else []}
    messages.error("Error in rule", extra=extra)
    return messages.shown[-1]


def end_of(messages):
    """Return the lines with which a failed build ends."""
    messages.error("WorkflowError:\nAt least one job did not complete successfully.")
    return messages.shown[-1].getMessage().split("\n")


def test_a_target_without_a_rule_says_what_targets_are(messages):
    change_messages(set(), str)
    messages.error("MissingRuleException:\nNo rule to produce a (if you use input functions x).")
    line = "No rule to produce a: results are output/STAGE/RECIPE"
    assert messages.shown[0].getMessage().endswith(line)


KILLED = (
    "error: a job was killed before it could say why, by a person, a limit of a cluster, or the"
    " kernel when memory ran out, or the disk of its log is full: "
)
OF_SHELL = "sh: line 1: /x/python: not found"
# The end of logs, what a cluster's plugin says, and the error.
FAILURES = (
    ("import: 0%\rerror: row 1\n", None, "error: row 1"),
    ("Traceback (most recent call last):\n  x\nTypeError: y\n", None, "TypeError: y"),
    ("train: 0%\rtrain: 9%\n77 % of the weights differ\n", None, KILLED + "{log}"),
    (OF_SHELL, None, f"error: {OF_SHELL}"),
    (None, None, KILLED + "{log}"),
    (None, "Job submission failed: no sbatch\n", "error: Job submission failed: no sbatch"),
    ("train: 9%", "status is: 'OUT_OF_MEMORY'", "error: status is: 'OUT_OF_MEMORY'"),
    ("error: row 2", "job 7 was cancelled", "error: row 2"),
)


def test_the_last_error_of_a_build_repeats_those_of_its_jobs(tmp_path, messages):
    out_of_memory = change_messages(set(), str)
    assert len(end_of(messages)) == 2
    expected = []
    for number, (text, message, error) in enumerate(FAILURES):
        log = tmp_path / f"{number}.log"
        if text is not None:
            log.write_text(text)
        # What a job printed is not repeated before the end, and each command is shown once.
        shown = fail(messages, log, message)
        assert shown.rule_msg == (message or "the last lines of the build have the error")
        expected.append(f"{error.format(log=log)} ({log})")
    assert len(messages.shown) == 1 + len(FAILURES)
    # A rule of another workflow may have no log.
    fail(messages, None, "no disk")
    messages.info("Shutting down")
    assert messages.shown[-1].getMessage() == "Shutting down"
    assert end_of(messages) == [*expected, "error: no disk"]
    assert +out_of_memory == {str(tmp_path / "6.log"): 1}


def test_a_log_of_an_earlier_run_is_not_the_error_of_a_job(tmp_path, messages):
    (log := tmp_path / "a.log").write_text("error: row 1\n")
    change_messages(set(), str)
    job = {"input": [], "output": [], "reason": "", "log": [str(log)]}
    messages.info("Rule", extra={"event": LogEvent.JOB_INFO, **job})
    fail(messages, log)
    assert end_of(messages) == [f"{KILLED}{log} ({log})"]
