"""Private interfaces of Snakemake that decide what runs; no other module uses them.

Written for Snakemake 9.27 and later versions 9. The workflow imports this module while it plans.
"""

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from snakemake import __version__ as SNAKEMAKE_VERSION
from snakemake.io import Mtime, ancient
from snakemake.jobs import Job
from snakemake.settings.types import RerunTrigger, SharedFSUsage, StorageSettings

from snakechat.workflow.errors import InputError
from snakechat.workflow.snakemake_command_line import refuse_options
from snakechat.workflow.snakemake_messages import hide_messages, repeat_errors


def check_version(version: str = SNAKEMAKE_VERSION) -> None:
    """Raise InputError for a Snakemake whose private interfaces may differ."""
    if not version.startswith("9."):
        raise InputError(
            f"Snakemake {version} is installed, and this workflow needs 9.27 or a later version 9:"
            " pip install --no-deps --requirement requirements.txt"
        )


def check_path(folder: Path) -> None:
    """Raise InputError for the path of a project in which Snakemake finds wildcards."""
    if "{" in str(folder) or "}" in str(folder):
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


def after_build(workflow: Any, finish: Callable[[], None]) -> None:
    """Call a function at the end of each build that succeeds, also if there was nothing to do.

    Snakemake's own hook (onsuccess) is not called then.
    """
    execute = workflow.execute

    def execute_and_finish(*arguments: Any, **named: Any) -> None:
        execute(*arguments, **named)
        if workflow.is_main_process and not workflow.dryrun:
            finish()

    workflow.execute = execute_and_finish


def planned_names(workflow: Any, rule: str) -> list[str]:
    """Return the wildcards, as paths, of a rule's jobs in the DAG, up to date or not."""
    jobs = (job for job in workflow.dag.jobs if job.rule.name == rule)
    return sorted("/".join(job.wildcards) for job in jobs)


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
