"""What the workflow takes from Snakemake beyond its rules: builds, messages and pods.

Snakemake itself carries out what is stale, by a stamp (Stamp). REPLACED lists all names that
the workflow replaces, with the reason why the public interface is not enough.
"""

import logging
import os
import re
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

from snakemake import __version__ as SNAKEMAKE_VERSION
from snakemake.io import IOFile, _IOFile, ancient, local
from snakemake.logging import logger
from snakemake.settings.types import SharedFSUsage, StorageSettings
from snakemake_interface_logger_plugins.common import LogEvent

from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import MEMORY, file_identity, write_atomically
from snakechat.workflow.printable import printable_line

REPLACED = {
    "snakemake.workflow.Workflow.execute": "A build locks its folder before it plans, writes what"
    " its jobs read before the first one, and completes models also where nothing is to be done."
    " Modules have no handlers (onstart, onsuccess), which know only the second moment.",
    "snakemake.io._IOFile.remove": "Snakemake deletes the output and the log of a job before it"
    " starts, and the output after it failed. Here, an old result stays until the new one is"
    " complete, and the launcher empties the log when it starts a program.",
}
REPLACED_ON_KUBERNETES = {
    "snakemake.workflow.Workflow.storage_settings": "The plugin declares that pods share nothing,"
    " and copies the files of each job from and to a storage. All pods mount one volume.",
    "snakemake.workflow.Workflow.overwrite_workdir": "Pods start in a folder of their own.",
    "kubernetes.client.BatchV1Api.create_namespaced_job": "The plugin has no option for the"
    " security context of a pod, or for one without a token of the API.",
    "kubernetes.client.CoreV1Api.read_namespaced_pod_log": "The plugin asks for the log of a"
    " previous container of a failed pod. There is none, and the error would end the build instead"
    " of starting a retry.",
}


def check_names(names: Iterable[str]) -> None:
    """Raise InputError unless the installed Snakemake has all of these names."""
    for name in names:
        owner, _, attribute = name.rpartition(".")
        try:
            found = resolve_name(owner)
        except (ImportError, AttributeError):
            found = None
        if not hasattr(found, attribute) and attribute not in getattr(found, "__annotations__", {}):
            raise InputError(
                f"Snakemake {SNAKEMAKE_VERSION} is installed, which has no {name}, and this"
                " workflow needs 9.27 or a later version 9:"
                " pip install --no-deps --requirement requirements.txt"
            )


# The input of a job whose time makes no output stale.
without_time = ancient


# --- builds -----------------------------------------------------------------------------------


def call_at_builds(
    workflow: Any, begin: Callable[[], None], start: Callable[[], None], finish: Callable[[], None]
) -> None:
    """Call functions at each build, but not at a dry run.

    begin, start, finish: Called before the jobs are planned, before jobs are selected to run, also
        if there is none, and after the last one, if none failed.
    """
    check_names(REPLACED)
    execute = workflow.execute

    def execute_build(executor_plugin: Any, *, scheduler_plugin: Any, **settings: Any) -> None:
        common = executor_plugin.common_settings
        if not workflow.is_main_process or common.dryrun_exec or common.touch_exec:
            execute(executor_plugin, scheduler_plugin=scheduler_plugin, **settings)
            return

        def scheduler(*arguments: Any) -> Any:
            # The jobs are planned; more are planned after a checkpoint of another workflow.
            start()
            made = scheduler_plugin.scheduler(*arguments)
            select = made.select_jobs

            def select_jobs(*arguments: Any) -> Any:
                try:
                    start()
                except SystemExit as error:
                    # Snakemake takes it for Ctrl-C, and prints nothing.
                    print(error, file=sys.stderr)
                    raise
                return select(*arguments)

            made.select_jobs = select_jobs
            return made

        begin()
        execute(executor_plugin, scheduler_plugin=SimpleNamespace(scheduler=scheduler), **settings)
        finish()

    workflow.execute = execute_build


def keep_published_files(rules: Collection[str]) -> None:
    """Have Snakemake delete no output and no log of these rules."""
    remove = _IOFile.remove

    async def remove_of_others(file: Any, *arguments: Any, **named: Any) -> None:
        if file.rule is None or file.rule.name not in rules:
            await remove(file, *arguments, **named)

    _IOFile.remove = remove_of_others


# --- the stamp ---------------------------------------------------------------------------------

# The stamp is the file by which Snakemake runs the jobs that are stale. It is an input of each job:
# a plain one of a job that is stale, and `ancient()` for one that is up to date. It is newer than
# every output, until the first job of a build starts: Snakemake checks that no input of a job is
# newer than its output.
#
# Each build gives it new content, because Snakemake ignores the time of a file whose content it
# knows. A dry run may be started beside a build and has a stamp of its own. Jobs on a cluster have
# none: Snakemake is told which job to run there.

# The last time that all file systems store.
LATEST = 2**31 - 1


class Stamp:
    """The stamp of this process.

    Args:
        is_used: Whether this process plans. A job on a cluster has no stamp.
        is_build: Whether jobs will run.
        is_flagged: Whether Snakemake has to be told that the file stays in its place: in a module
            with a prefix, or beside a storage. The flag takes time at each job.

    Attributes:
        times_started: How often jobs have started. After that, another stamp is used, and Snakemake
            would miss its path among the inputs of another plan.
    """

    def __init__(self, is_used: bool, is_build: bool, is_flagged: bool) -> None:
        self._flag: Callable[[str], Any] = local if is_flagged else str
        self._is_used = is_used
        self.times_started = 0
        of_builds, of_plans = MEMORY / "build", MEMORY / "stale"
        self._path = of_builds if is_build else of_plans
        has_stamp = of_plans.exists() and of_plans.stat().st_mtime == LATEST
        if is_used and (is_build or not has_stamp):
            self._write(uuid.uuid4().hex if is_build else "")
        # With --rerun-triggers input, inputs are compared with the last run's, which was a build.
        self._fresh = of_builds if of_builds.exists() else of_plans

    def start_jobs(self) -> None:
        """Make the stamp older than what jobs will write.

        Jobs that are planned after a checkpoint have another one, which is newer again.
        """
        os.utime(self._path, (0, 0))
        self.times_started += 1
        self._path = MEMORY / f"later-{self.times_started}"
        self._write(uuid.uuid4().hex)

    def inputs(self, is_stale: bool) -> dict[str, Any]:
        """Return the input of a job, by its name."""
        if not self._is_used:
            return {}
        path = self._flag(str(self._path if is_stale else self._fresh))
        return {"stamp": path if is_stale else without_time(path)}

    def _write(self, content: str) -> None:
        write_atomically(self._path, content, durable=False)
        os.utime(self._path, (LATEST, LATEST))


def forget(workflow: Any, path: str) -> None:
    """Delete what Snakemake remembers of an output and its inputs."""
    workflow.persistence.cleanup_metadata(IOFile(path))


# --- messages -----------------------------------------------------------------------------------

# The rule that a message is about, or the rules.
_OF_RULES = re.compile(
    r"^(?:Warning: the following output files of rule|Removing output files of failed job) (\w+)"
    "|Rules with (?:missing|outdated) metadata: (.*)"
)
# What Slurm and Kubernetes say, and scripts/launch.py of a process that the kernel killed.
OUT_OF_MEMORY = re.compile("OUT_OF_MEMORY|OOMKilled|ended by SIGKILL")
# The last line of a log that is an error: of ours, or of the shell, which does not find a program.
OF_PROGRAM, OF_SHELL = ("error: ", "stopped by "), re.compile(r"\S*sh: (line [0-9]+: )?\S+: ")


def change_messages(rules: set[str], causes: Callable[[str], str]) -> Counter[str]:
    """Have Snakemake print why jobs are stale, and end a failed build with a line for each job.

    Messages that do not apply to our rules are dropped: its plan did not expect the folders that
    users ask for, and it has no metadata of them, because an upstream job wrote them and their own
    rule has no command. A failed job loses no output.

    causes: Returns why an output is stale, or an empty string.

    Returns how often jobs ran out of memory, by their logs. It is updated.
    """
    errors, out_of_memory = dict[str, None](), Counter[str]()
    # The logs as they were when their jobs started: an earlier run may have written them.
    before: dict[str, list[int]] = {}

    def change(record: logging.LogRecord) -> bool:
        shown, text = record.__dict__, record.getMessage()
        event, log = shown.get("event"), next(iter(shown.get("log") or ()), "")
        if event == LogEvent.JOB_INFO:
            shown["input"] = [path for path in shown["input"] if not path.startswith(str(MEMORY))]
            if str(MEMORY) in shown["reason"]:
                found = "; ".join(filter(None, map(causes, shown["output"])))
                shown["reason"] = found or "Forced execution"
            if os.path.exists(log):
                before[log] = file_identity(log)
        elif event == LogEvent.JOB_ERROR:
            # A cluster's plugin says how the job ended, and where its log is.
            message = shown.get("rule_msg")
            is_of_run = os.path.exists(log) and file_identity(log) != before.get(log)
            error = _error(Path(log).read_text(errors="replace") if is_of_run else "", message, log)
            errors[f"{error} ({log})" if log else error] = None
            # Snakemake would print None.
            shown["rule_msg"] = message or "the last lines of the build have the error"
            out_of_memory[log] += bool(OUT_OF_MEMORY.search(f"{message} {error}"))
        elif text.startswith("RuleException:\nCalledProcessError"):
            # The message about the job has the same command.
            return False
        elif text.startswith("MissingRuleException"):
            start = text.partition(" (if you use input functions")[0]
            record.msg, record.args = f"{start}: results are output/STAGE/RECIPE", ()
        elif errors and text.startswith("WorkflowError:\nAt least one job did not complete"):
            record.msg, record.args = "\n".join(errors), ()
        of_rules = _OF_RULES.search(text)
        return not of_rules or not rules.issuperset((of_rules[1] or of_rules[2]).split())

    logger.addFilter(change)
    return out_of_memory


def _error(text: str, message: str | None, log: str) -> str:
    """Return the error of a job: the last line of its log, or what a cluster's plugin says.

    A job that is killed, for example by the kernel because memory is exhausted, writes none; nor
    does one that a cluster did not accept.
    """
    # Progress bars return to the start of their line, which is read as a line feed.
    last = printable_line(text.rstrip().rpartition("\n")[2].strip())
    if last.startswith(OF_PROGRAM) or "Traceback (most recent call last):" in text:
        return last
    if OF_SHELL.match(last):
        return f"error: {last}"
    if message:
        return f"error: {printable_line(message.strip())}"
    return (
        "error: a job was killed before it could say why, by a person, a limit of a cluster, or the"
        f" kernel when memory ran out, or the disk of its log is full: {log}"
    )


# --- Kubernetes -------------------------------------------------------------------------------


# The user of the image (envs/Dockerfile). Kubernetes gives the volume to its group, where the type
# of the volume allows it.
USER = 1000
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


class SharedVolume(StorageSettings):
    """Settings of storage for pods that share a volume."""

    # Pods start in a folder of their own, and have to be given this one.
    assume_common_workdir = False


def use_shared_volume(workflow: Any) -> None:
    """Have pods of Kubernetes read and write files of a shared volume in place.

    With provider `fs` (profiles/kubernetes), files stay where they are. Only the installed software
    belongs to a pod.
    """
    if workflow.storage_settings.default_storage_provider != "fs":
        return
    check_names(REPLACED_ON_KUBERNETES)
    per_pod = {SharedFSUsage.SOFTWARE_DEPLOYMENT, SharedFSUsage.SOURCE_CACHE}
    changed = {"default_storage_provider": None, "shared_fs_usage": SharedFSUsage.all() - per_pod}
    workflow.storage_settings = SharedVolume(**{**vars(workflow.storage_settings), **changed})
    workflow.overwrite_workdir = os.getcwd()


def restrict_pods(workflow: Any) -> None:
    """Have the pods of a build on Kubernetes run restricted and without a token of the API.

    A failed pod's log is read from its only container.
    """
    if workflow.executor_plugin.name != "kubernetes":
        return
    from kubernetes.client import BatchV1Api, CoreV1Api

    create_job, read_log = BatchV1Api.create_namespaced_job, CoreV1Api.read_namespaced_pod_log

    def create_restricted_job(api: Any, namespace: str, body: Any, **options: Any) -> Any:
        pod = body.spec.template.spec
        pod.automount_service_account_token = False
        pod.security_context = POD_SECURITY
        for container in pod.containers:
            # A user may have asked for privileged containers (kubernetes-privileged).
            container.security_context = container.security_context or CONTAINER_SECURITY
        return create_job(api, namespace, body, **options)

    def read_only_log(api: Any, *arguments: Any, **options: Any) -> Any:
        return read_log(api, *arguments, **{**options, "previous": False})

    BatchV1Api.create_namespaced_job = create_restricted_job
    CoreV1Api.read_namespaced_pod_log = read_only_log
