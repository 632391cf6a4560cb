"""Private interfaces of Snakemake that the workflow needs; no other module uses them.

Written for Snakemake 9.27 and later versions 9. The workflow imports this module while it plans.
"""

import contextlib
import gc
import io
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from snakemake import __version__ as SNAKEMAKE_VERSION
from snakemake.common.configfile import load_configfile
from snakemake.exceptions import CliException
from snakemake.io import Mtime, ancient
from snakemake.jobs import Job
from snakemake.logging import logger
from snakemake.settings.types import RerunTrigger, SharedFSUsage, StorageSettings
from snakemake.utils import update_config
from snakemake_interface_logger_plugins.common import LogEvent

from snakechat.workflow.errors import InputError
from snakechat.workflow.printable import printable_line


def check_version(version: str = SNAKEMAKE_VERSION) -> None:
    """Raise InputError for a Snakemake whose private interfaces may differ."""
    if not version.startswith("9."):
        raise InputError(
            f"Snakemake {version} is installed, and this workflow needs 9.27 or a later version 9:"
            " pip install --no-deps --requirement requirements.txt"
        )


def check_path(folder: Path) -> None:
    """Raise InputError for the path of a project in which Snakemake finds wildcards."""
    if re.search("[{}]", str(folder)):
        raise InputError(
            f"{folder}: Snakemake takes braces in a path for wildcards: rename the folder"
        )


def adapt(workflow: Any) -> None:
    """Change what Snakemake prints, deletes and takes for a target, before it plans."""
    collect_garbage_rarely()
    hide_messages(workflow)
    keep_published_files()
    repeat_errors()
    refuse_options(workflow)
    complete_targets(workflow)
    use_shared_volume(workflow)


def collect_garbage_rarely() -> None:
    """Have Python search for unreachable cycles of objects less often.

    Planning creates many objects and nearly no such cycles: searching would take up to a quarter of
    its time.
    """
    gc.freeze()
    gc.set_threshold(200_000)


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


def jobs_share_environment(workflow: Any) -> bool:
    """Return whether jobs run in the Python environment of Snakemake, and not in another one."""
    methods = workflow.deployment_settings.deployment_method
    shared = workflow.storage_settings.shared_fs_usage
    return not methods and SharedFSUsage.SOFTWARE_DEPLOYMENT in shared


def before_report(workflow: Any, prepare: Callable[[], None]) -> None:
    """Call a function before Snakemake plans a report, in which stale results would appear too.

    The option --report may be on the command line or in a profile.
    """
    create_report = workflow.create_report

    def create(*arguments: Any, **named: Any) -> None:
        prepare()
        create_report(*arguments, **named)

    workflow.create_report = create


def after_build(workflow: Any, finish: Callable[[], None], preview: Callable[[], None]) -> None:
    """Call a function at the end of each build that succeeds, also if there was nothing to do.

    Snakemake's own hook (onsuccess) is not called then. The report of --report-after-run is written
    before the call. A report alone is not a build.

    Args:
        workflow: The workflow.
        finish: The function.
        preview: Called at the end of a dry run instead.
    """
    execute, create_report = workflow.execute, workflow.create_report
    reports = "--report-after-run" in sys.argv

    def execute_and_finish(*arguments: Any, **named: Any) -> None:
        execute(*arguments, **named)
        if workflow.dryrun:
            preview()
        elif workflow.is_main_process and not reports:
            finish()

    def report_and_finish(*arguments: Any, **named: Any) -> None:
        create_report(*arguments, **named)
        if reports:
            finish()

    workflow.execute, workflow.create_report = execute_and_finish, report_and_finish


def planned_names(workflow: Any, rule: str) -> list[str]:
    """Return the wildcards, as paths, of a rule's jobs in the DAG, up to date or not."""
    jobs = (job for job in workflow.dag.jobs if job.rule.name == rule)
    return sorted("/".join(job.wildcards) for job in jobs)


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


def refuse_options(workflow: Any) -> None:
    """Have options fail that take a manifest for the whole result.

    --summary and --list-*-changes know nothing of specs and contents, --delete-all-output would
    leave the results, and --generate-unit-tests copies manifests alone.
    """

    def fail(*_: Any, **__: Any) -> NoReturn:
        sys.exit(
            "error: --summary and --list-changes compare times and commands, which do not decide"
            " here what is stale: run python scripts/explain.py, or snakemake -n"
        )

    delete_output = workflow.delete_output

    def delete(only_temp: bool = False, dryrun: bool = False) -> None:
        if not only_temp:
            sys.exit(
                "error: --delete-all-output knows the manifests of results and not their files: run"
                " make clean-output, or delete folders below output/"
            )
        delete_output(only_temp=only_temp, dryrun=dryrun)

    def refuse_tests(*_: Any, **__: Any) -> NoReturn:
        sys.exit(
            "error: --generate-unit-tests copies the manifests of results and not their files: to"
            " build a result again and compare it, run make reproduce TARGET=output/..."
        )

    workflow.summary = workflow.list_changes = fail
    workflow.delete_output, workflow.generate_unit_tests = delete, refuse_tests


def complete_targets(workflow: Any) -> None:
    """Have the folder of a result, and each file in it, be a target as its manifest is."""
    prepare_dag = workflow._prepare_dag

    def made(path: str) -> bool:
        return any(rule.is_producer(path) for rule in workflow.rules)

    def complete(target: str) -> str:
        path = Path(target)
        if path.parts[:1] != ("output",) or made(target):
            return target
        manifests = (f"{folder}.manifest.json" for folder in (path, *path.parents))
        return next(filter(made, manifests), target)

    def complete_and_prepare(*arguments: Any, **named: Any) -> None:
        settings = workflow.dag_settings
        settings.targets = set(map(complete, settings.targets))
        prepare_dag(*arguments, **named)

    workflow._prepare_dag = complete_and_prepare


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


# --- staleness --------------------------------------------------------------------------------


class SameTimes(dict[Any, Any]):
    """A cache of file times in which all files have the same time."""

    def __contains__(self, file: object) -> bool:
        return True

    def __getitem__(self, file: Any) -> Mtime:
        return Mtime(local=1.0)


def without_times(paths: Iterable[str]) -> list[Any]:
    """Return inputs whose times make no output stale."""
    return [ancient(path) for path in paths]


def decide_staleness(workflow: Any, changes: Callable[[str], str]) -> None:
    """Have a function decide which existing results are stale, in place of the times of files.

    To be called by input functions, the first code of ours that runs when the DAG exists. Later
    calls do nothing.

    Args:
        changes: Returns why an output is stale, or an empty string.
    """
    if isinstance(workflow.iocache.mtime, SameTimes):
        return

    def params_changed(job: Any) -> str:
        missing = [path for path in job.output if not Path(path).exists()]
        # Snakemake asks only for the outputs that are needed: a page may exist without its result.
        if 0 < len(missing) < len(job.output):
            return f"missing {', '.join(missing)}"
        return "; ".join(filter(None, map(changes, job.output)))

    workflow.iocache._mtime = SameTimes()
    workflow.dag_settings.rerun_triggers = frozenset([RerunTrigger.PARAMS])
    persistence = workflow.persistence
    # A tree that is read-only can be planned too; check_folders names it before the first job.
    Job.check_protected_output = _do_nothing
    if workflow.dryrun:
        persistence.save_iocache = lambda: None
    persistence.has_metadata = lambda job: True
    persistence.has_outdated_metadata = lambda job: False
    persistence.params_changed = params_changed


def keep_published_files() -> None:
    """Have Snakemake delete neither results nor logs before a job starts or after it failed.

    The path of a result leads to the old one until the new one is complete, and the launcher
    empties a log when it starts a program.
    """

    Job.remove_existing_output = Job.cleanup = _do_nothing


async def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def force_inputs(workflow: Any, rule: str, output: str, inputs: Iterable[str]) -> None:
    """Force the jobs that make the inputs of a rule without a command, if it is forced itself."""
    dag = workflow.dag
    if _is_forced(dag, rule, [output]):
        dag.forcefiles.update(inputs)


def _is_forced(dag: Any, rule: str, outputs: Iterable[str]) -> bool:
    """Return whether --force, --forceall or --forcerun asks for a job.

    Its `Reason` does not say so if an upstream job is a reason too.
    """
    forced_rules = {forced.name for forced in dag.forcerules}
    return rule in forced_rules or not dag.forcefiles.isdisjoint(outputs)


class JobToRun(NamedTuple):
    """A job of the DAG that has a command and will run.

    rule, name: Its rule, and its wildcards as a path. forced: Whether --force, --forceall or
    --forcerun asks for it.
    """

    rule: str
    name: str
    forced: bool


def jobs_to_run(workflow: Any) -> Iterator[JobToRun]:
    """Yield the jobs with a command that will run."""
    for job in workflow.dag.needrun_jobs():
        if not job.is_norun:
            forced = _is_forced(workflow.dag, job.rule.name, job.output)
            yield JobToRun(job.rule.name, "/".join(job.wildcards), forced)


# --- messages and settings --------------------------------------------------------------------


def check_scheduler(workflow: Any) -> None:
    """Raise InputError if jobs go to Slurm and this machine has none, before they are retried."""
    if workflow.executor_plugin.name == "slurm" and shutil.which("sbatch") is None:
        raise InputError(
            "executor slurm (profiles/slurm): the command sbatch is not on PATH: start the build on"
            " a login node of the cluster, or without --profile slurm"
        )


def jobs_run_here(workflow: Any, arguments: list[str] | None = None) -> bool:
    """Return whether jobs run on this machine, or would run without --dry-run."""
    name = workflow.executor_plugin.name
    words = sys.argv if arguments is None else arguments
    options = {word.partition("=")[0] for word in words}
    elsewhere = options & {"--profile", "--executor", "-e"} or "SNAKEMAKE_PROFILE" in os.environ
    return name == "local" or (name == "dryrun" and not elsewhere)


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
            error = _last_line(getattr(record, "log", ()))
            errors[error] = None
            # A cluster's plugin says how the job ended, and where its log is.
            record.__dict__["rule_msg"] = getattr(record, "rule_msg", None) or error
        if errors and text.startswith("WorkflowError:\nAt least one job did not complete"):
            record.msg, record.args = "\n".join(errors), ()
        return True

    logger.addFilter(shorten)


# The start of the stack of an exception of Python.
TRACEBACK = "Traceback (most recent call last):"


def _last_line(logs: Sequence[str]) -> str:
    """Return the error of a job, which is the last line of its first log.

    A job that is killed, for example by the kernel because memory is exhausted, writes none.
    """
    try:
        text = Path(logs[0]).read_text(errors="replace")
    except (IndexError, OSError):
        text = ""
    # Progress bars return to the start of their line.
    texts = [shown for line in text.split("\n") if (shown := line.rpartition("\r")[2].strip())]
    has_error = texts and (texts[-1].startswith(("error: ", "stopped by ")) or TRACEBACK in text)
    if not has_error:
        return (
            "error: a job ended without a message, as if it was killed, for example because memory"
            f" was exhausted: {', '.join(logs)}"
        )
    return printable_line(texts[-1])


class SharedVolume(StorageSettings):
    """Settings of storage for pods that share a volume."""

    # Pods start in a folder of their own, and have to be given this one.
    assume_common_workdir = False


def use_shared_volume(workflow: Any) -> None:
    """Have pods of Kubernetes read and write files of a shared volume in place.

    The plugin for Kubernetes declares that pods share nothing, and copies the files of each job
    from and to a storage that it asks for (default-storage-provider). With provider `fs`
    (profiles/kubernetes), files stay where they are; only the installed software belongs to a pod.
    """
    if workflow.storage_settings.default_storage_provider != "fs":
        return
    per_pod = {SharedFSUsage.SOFTWARE_DEPLOYMENT, SharedFSUsage.SOURCE_CACHE}
    changed = {
        "default_storage_provider": None,
        "shared_fs_usage": SharedFSUsage.all() - per_pod,
    }
    workflow.storage_settings = SharedVolume(**{**vars(workflow.storage_settings), **changed})
    workflow.overwrite_workdir = os.getcwd()
