"""Options of Snakemake: what they say, and those that have no effect here."""

import argparse
import contextlib
import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from snakemake.common.configfile import load_configfile
from snakemake.exceptions import CliException
from snakemake.utils import update_config

from snakechat.workflow.errors import InputError


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
