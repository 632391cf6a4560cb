"""Options of Snakemake: what they say, and those that have no effect here."""

import contextlib
import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

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


class Options(NamedTuple):
    """Options of Snakemake that decide what a build consists of.

    Attributes:
        targets: Targets among the options.
        directory: The folder of the build, None for the current one.
        configfiles: The files of --configfile.
        config: The values of --config, which are text below the top level.
    """

    targets: list[str]
    directory: Path | None
    configfiles: list[Path]
    config: dict[str, Any]


def parse_options(words: list[str]) -> Options:
    """Parse options of Snakemake, on the command line and in its profiles.

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
    files = [Path(file).absolute() for file in options.configfile or ()]
    return Options(list(options.targets), options.directory, files, config)


def read_config(files: Iterable[Path], command_line: dict[str, Any]) -> dict[str, Any]:
    """Return the values of config files, later ones on top, as Snakemake reads them."""
    values: dict[str, Any] = {}
    for file in files:
        update_config(values, load_configfile(file))
    update_config(values, command_line)
    return values


_LISTINGS = (
    "--summary and --list-changes compare times and commands, which do not decide here what is"
    " stale: run python scripts/explain.py, or snakemake -n"
)
_DELETION = (
    "--delete-all-output and --delete-temp-output know manifests and not the files of results: run"
    " make clean-output, or delete folders below output/"
)
# Options that take the manifest of a result for the whole result, by their names in Snakemake.
REFUSED = {
    **dict.fromkeys(("summary", "detailed_summary", "list_changes"), _LISTINGS),
    **dict.fromkeys(("list_input_changes", "list_params_changes"), _LISTINGS),
    **dict.fromkeys(("delete_all_output", "delete_temp_output"), _DELETION),
    "list_untracked": "--list-untracked knows manifests and not the files of results, and would"
    " name trained weights: run python scripts/store.py list",
    "generate_unit_tests": "--generate-unit-tests copies the manifests of results and not their"
    " files: to build a result again and compare it, run make reproduce TARGET=output/...",
}
_TOUCH = (
    "--touch sets times, which do not decide here what is stale: to keep results whose code or"
    " libraries changed, run python scripts/accept.py TARGET --because REASON"
)
_CACHE = (
    "--cache knows manifests and not the files of results: the store keeps all versions of them"
)


def check_options(workflow: Any) -> bool:
    """Return whether Snakemake writes a report, at the first question of its plan.

    Raises:
        InputError: An option would leave results in a wrong state, or say what is wrong of them.
    """
    if workflow.workflow_settings.cache is not None:
        raise InputError(_CACHE)
    if workflow.execution_settings is not None:
        if workflow.touch:
            raise InputError(_TOUCH)
        return False
    # Snakemake's API has no settings of options that execute nothing.
    from snakemake.cli import parse_args

    with contextlib.redirect_stderr(io.StringIO()):
        try:
            _, options = parse_args(sys.argv[1:])
        except (SystemExit, ValueError, CliException):
            # Another program uses the API.
            return False
    for name, message in REFUSED.items():
        if getattr(options, name, None):
            raise InputError(message)
    return options.report is not None
