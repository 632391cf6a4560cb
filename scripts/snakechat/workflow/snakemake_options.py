"""Options of Snakemake: what they set, which of them change the config, and which are refused."""

import argparse
import io
import sys
from collections.abc import Iterable
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

from snakemake.common.configfile import load_configfile
from snakemake.exceptions import CliException
from snakemake.settings.types import SharedFSUsage
from snakemake.utils import update_config

from snakechat.workflow.errors import InputError


def jobs_share_environment(workflow: Any) -> bool:
    """Return whether jobs run in the Python environment of Snakemake, and not in another one."""
    is_shared = SharedFSUsage.SOFTWARE_DEPLOYMENT in workflow.storage_settings.shared_fs_usage
    return is_shared and not workflow.deployment_settings.deployment_method


def config_options(arguments: list[str]) -> list[str]:
    """Return the words of a command line that change the config: --configfile and --config.

    A rebuild needs them again.
    """
    options, kept = [], False
    for word in arguments:
        if word.startswith("-"):
            kept = word.partition("=")[0] in ("--configfile", "--configfiles", "--config", "-C")
        if kept:
            options.append(word)
    return options


def parse_options(words: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the options of a command line with its profiles, and the values of --config.

    Values are text below the top level. Raises InputError if Snakemake rejects an option.
    """
    # It takes seconds, and Snakemake's API works without it.
    from snakemake.cli import parse_args, parse_config

    with redirect_stderr(io.StringIO()) as messages:
        try:
            _, options = parse_args(words)
            return options, parse_config(options.config)
        except (ValueError, CliException) as error:
            raise InputError(str(error)) from None
        except SystemExit:
            raise InputError(messages.getvalue().rstrip().rpartition("error: ")[2]) from None


def read_config(files: Iterable[Path], command_line: dict[str, Any]) -> dict[str, Any]:
    """Return the values of config files, later ones on top, as Snakemake reads them."""
    values: dict[str, Any] = {}
    for each in (*map(load_configfile, files), command_line):
        update_config(values, each)
    return values


# Options that take the manifest of a result for the whole result, or times for what makes it stale,
# by their names in Snakemake, and what to run instead.
LISTS = ("summary", "detailed_summary", "list_changes", "list_input_changes", "list_params_changes")
REFUSED = {
    **dict.fromkeys(LISTS, "python scripts/explain.py, or snakemake -n"),
    "delete_all_output": "make clean-output, or delete folders below output/",
    "delete_temp_output": "make clean-output, or delete folders below output/",
    "list_untracked": "python scripts/store.py list",
    "generate_unit_tests": "make reproduce TARGET=output/...",
    "touch": "python scripts/accept.py TARGET --because REASON, if code or libraries changed",
    "cache": "the same command without it: the store keeps all versions of results",
}


def check_options(workflow: Any) -> bool:
    """Return whether Snakemake writes a report, which it knows from its first question on.

    Raises InputError if an option would leave results in a wrong state, or print what is not true.
    """
    used: dict[str, Any] = {}
    if workflow.execution_settings is not None:
        used["touch"] = workflow.touch
    else:
        # Snakemake's API has no settings of options that execute nothing. Another program that uses
        # the API has other options.
        with suppress(InputError):
            used = vars(parse_options(sys.argv[1:])[0])
    used = {**used, "cache": workflow.workflow_settings.cache is not None}
    for name, advice in REFUSED.items():
        if used.get(name):
            raise InputError(
                f"--{name.replace('_', '-')} looks at manifests and times, and not at the files and"
                f" specs of results: run {advice}"
            )
    return used.get("report") is not None
