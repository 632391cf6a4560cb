"""Options of Snakemake: what they say, and those that have no effect here."""

import contextlib
import io
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from snakemake.common.configfile import load_configfile
from snakemake.exceptions import CliException
from snakemake.utils import update_config

from snakechat.workflow.errors import InputError


def command_line_config(workflow: Any) -> dict[str, Any]:
    """Return the values of --config, which Snakemake leaves as text below the top level."""
    return dict(workflow.config_settings.config)


def command_line_configfiles(workflow: Any) -> list[Path]:
    """Return the files of --configfile."""
    return list(workflow.config_settings.configfiles)


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
    """Parse options of Snakemake, including those of its profiles.

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


# What options do that take the manifest of a result for the whole result, by methods of Snakemake's
# workflow. --summary and --list-*-changes know nothing of specs and contents.
_LISTINGS = (
    "--summary and --list-changes compare times and commands, which do not decide here what is"
    " stale: run python scripts/explain.py, or snakemake -n"
)
REFUSED = {
    "summary": _LISTINGS,
    "list_changes": _LISTINGS,
    "generate_unit_tests": "--generate-unit-tests copies the manifests of results and not their"
    " files: to build a result again and compare it, run make reproduce TARGET=output/...",
    "delete_output": "--delete-all-output and --delete-temp-output know manifests and not the files"
    " of results: run make clean-output, or delete folders below output/",
}


def refuse_options(workflow: Any) -> None:
    """Have the options fail that do not fit this workflow."""

    def fail(message: str, *_: Any, **__: Any) -> NoReturn:
        sys.exit(f"error: {message}")

    for method, message in REFUSED.items():
        setattr(workflow, method, partial(fail, message))


def check_command(workflow: Any) -> None:
    """Raise InputError for options that would leave results in a wrong state.

    Snakemake knows them once it has parsed the Snakefile.
    """
    if workflow.touch:
        raise InputError(
            "--touch sets times, which do not decide here what is stale: to keep results whose code"
            " or libraries changed, run python scripts/accept.py TARGET --because REASON"
        )
    # None while Snakemake writes a report.
    settings = workflow.execution_settings
    if workflow.is_main_process and not workflow.dryrun and settings and settings.no_hooks:
        raise InputError("--no-hooks: the first hook writes what jobs are made from: omit it")
