"""What rules ask of a build: inputs, parameters and resources of jobs, and its start and its end.

Snakemake calls these functions while it plans, and several times for a job. A mistake of a user is
one line. Only the Snakefile uses this module.
"""

import copy
import functools
import gc
import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from snakechat.config.loading import check_config_files, load_config, project_files
from snakechat.config.recipes import STAGES
from snakechat.config.rlhf import api_key
from snakechat.jobs.planner import default_targets, jobs_of_target
from snakechat.jobs.rules import RULES, job_resources, used_resources
from snakechat.jobs.stale_causes import causes_of
from snakechat.jobs.staleness import Jobs, PlannedJob
from snakechat.workflow import snakemake_adapter as adapter
from snakechat.workflow.code_digests import Snapshot, build_path
from snakechat.workflow.errors import InputError, describe_error
from snakechat.workflow.links import (
    PARTS,
    check_link,
    is_linked,
    link_part,
    link_result,
    lock_output,
    register_root,
    replace_link,
)
from snakechat.workflow.manifest import MANIFEST
from snakechat.workflow.processes import Placement
from snakechat.workflow.publishing import check_machine, import_reward_functions
from snakechat.workflow.snakemake_options import (
    check_options,
    config_options,
    jobs_share_environment,
    read_config,
)
from snakechat.workflow.store import is_writable, parse_size, warn_of_size

# A function of the wildcards of a job; its other arguments are those that Snakemake knows by name.
RuleFunction = Callable[..., Any]
# The error of a report that would show a result that is not up to date.
NOT_REPORTED = (
    "{} is {}, and a report shows results that are up to date: first run the same command with"
    " --cores 1 instead of --report (python scripts/explain.py prints what changed)"
)


def fails_in_one_line(function: RuleFunction) -> RuleFunction:
    """Have a function that Snakemake calls stop with one line at an error that users can act on."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except (InputError, OSError) as error:
            sys.exit(f"error: {describe_error(error, 'output') or error}")

    # Snakemake asks for the signature of each function once per job.
    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return call


def functions_of(workflow: Any, config: dict[str, Any], planned: dict[str, Any]) -> "RuleFunctions":
    """Return the functions of a workflow. `use rule ... with` of a module asks for them again."""
    path = workflow.modifier.path_modifier.replace_prefix("output/x")
    prefix, _, rest = path.rpartition("output/x")
    if rest:
        raise InputError("replace_prefix of a module changes paths below output/: use prefix")
    key = copy.deepcopy((prefix, config))
    if "snakechat" not in vars(workflow):
        workflow.snakechat = key, RuleFunctions(workflow, config, planned, prefix)
    before, functions = workflow.snakechat
    if before != key:
        raise InputError(
            "two modules are Snakechat, and their config or their prefix differ: use one, whose"
            " config has the recipes of both"
        )
    return functions


class RuleFunctions:
    """The functions that rules call.

    Args:
        workflow: The workflow of Snakemake.
        config: The config of the user, for values on top of the project's files.
        planned: The folder of the sources; on a cluster, the build that submitted this job, as its
            file has it.
        prefix: The folder of the module's results, with a slash at its end; empty without one. Its
            output/ is a link: jobs write below output/ of the current folder.

    Attributes:
        config: The checked config.
        snapshot: The sources that jobs run.
        build_file: The file that jobs plan with.
    """

    def __init__(
        self, workflow: Any, config: dict[str, Any], planned: dict[str, Any], prefix: str
    ) -> None:
        self.workflow, self._prefix, sources = workflow, prefix, Path(planned["sources"])
        # Relative paths of the config start from the Snakefile that users run; from the current
        # folder if it is in workflow/, as snakedeploy writes it, or in no folder.
        root = Path(workflow.basedir)
        if root == Path("workflow").absolute() or not root.is_dir():
            root = Path.cwd()
        is_main = workflow.modifier.is_main_snakefile()
        if workflow.remote_exec:
            values, command_line = planned["config"], planned["command_line"]
        else:
            named = workflow.config_settings.configfiles if is_main else ()
            check_config_files([*project_files(sources), *named])
            values = read_config(project_files(sources), config)
            # Snakemake leaves values below the top level as text.
            command_line = dict(workflow.config_settings.config) if is_main else {}
        self.config = load_config(copy.deepcopy(values), root, sources, command_line)
        self.snapshot = Snapshot(sources)
        self._build = {
            "sources": str(self.snapshot.folder.absolute()),
            "config": values,
            "command_line": command_line,
        }
        self.build_file = str(build_path(self._build))
        self._jobs = Jobs(self.config, sources, config_options(sys.argv[1:]))
        self._is_build = self._is_planned = self._ran_jobs = False
        # The stale jobs that were planned after others had started.
        self._planned_later: list[PlannedJob] = []
        # The jobs that were asked for, and what folders that users ask for lack, by output.
        self._makes: dict[str, PlannedJob] = {}
        self._lacks: dict[str, list[str]] = {}
        self._will_run = functools.cache(self._find_will_run)
        # The names of our rules in the workflow, where a module may have changed them.
        self._names = {
            rule: workflow.modifier.modify_rulename(rule)
            for rule in (*RULES, *STAGES, "report", "result_folder", "result_file")
        }
        self._rules = {name: rule for rule, name in self._names.items()}
        # Python searches for cycles of objects less often: a quarter of the time of planning.
        gc.freeze()
        gc.set_threshold(200_000)
        # What Snakemake deletes and prints, and what it does at a build.
        adapter.use_shared_volume(workflow)
        adapter.keep_published_files(self._rules.keys())
        adapter.call_at_builds(
            workflow, *map(fails_in_one_line, (self.begin, self.start, self.finish))
        )
        self._out_of_memory = adapter.change_messages(set(self._rules), self._changes)

    # --- jobs ---------------------------------------------------------------------------------

    def inputs(self, rule: str, **fixed: str) -> RuleFunction:
        """Return an input function: the manifests of the upstream jobs, by the program's names.

        fixed: The results that do not depend on the config, for readers of the rules. A job need
            not have all of them.
        """

        @fails_in_one_line
        def lookup(wildcards: Any) -> dict[str, Any]:
            job = self._jobs[rule, "/".join(wildcards)]
            will_run, is_stale = self._will_run(job), self._is_stale(job)
            for key in job.inputs.keys() & fixed.keys():
                assert job.inputs[key].path == fixed[key].format(**wildcards), (rule, key)
            self._makes[self._prefix + job.manifest] = job
            self._is_planned = True
            if is_stale and self._stamp.times_started:
                self._planned_later.append(job)
            inputs = {key: self._input(each, will_run) for key, each in job.inputs.items()}
            return {**inputs, **self._stamp.inputs(is_stale)}

        return lookup

    def _input(self, job: PlannedJob, will_run: bool) -> Any:
        """Return an input of a job: the manifest of an upstream job.

        If the reader will run, the input is a plain path, because the upstream job may run first.
        Otherwise it is `ancient()`, and Snakemake ignores its time.
        """
        # The link of a result that is up to date may be missing. A build makes it.
        self._will_run(job)
        path = job.manifest
        if job.result is not None and not Path(path).exists():
            path = str(job.result.folder / MANIFEST)
        return path if will_run else adapter.without_time(path)

    @fails_in_one_line
    def command(self, wildcards: Any, output: Any) -> str:
        """Return the command of a job, quoted for the shell.

        It depends on the output, and Snakemake does not compare such a parameter with the one of
        the last run: specs decide what is stale.
        """
        # The manifest is the first output.
        job = self._makes[output[0]]
        python = sys.executable if jobs_share_environment(self.workflow) else "python"
        scripts = f"{self.snapshot.folder}/scripts"
        return shlex.join([python, *job.command(scripts, self._placement(job))])

    @fails_in_one_line
    def threads(self, wildcards: Any, rulename: str) -> int:
        """Return the CPU threads of a job on each node."""
        return self._placement(self._jobs[self._rules[rulename], "/".join(wildcards)]).threads

    @property
    def resources(self) -> dict[str, RuleFunction]:
        """The resources of a job that runs a model."""
        defaults = self.workflow.resource_settings._parsed_default_resources

        def lookup(key: str, wildcards: Any, rulename: str) -> int | str | None:
            job = self._jobs[self._rules[rulename], "/".join(wildcards)]
            # It may have run out of memory in this build.
            failures = self._out_of_memory[f"{self._prefix}output/logs/{job.rule}/{job.name}.log"]
            found = job_resources(self._placement(job), failures)[key]
            # Otherwise, the options or the profile may give one.
            return getattr(defaults.get(key), "raw", None) if found is None else found

        keys = used_resources(self.config)
        return {key: fails_in_one_line(functools.partial(lookup, key)) for key in keys}

    # --- targets ------------------------------------------------------------------------------

    def results(self, folder: str) -> RuleFunction:
        """Return the input function of the folders output/FOLDER/... that users ask for.

        folder: A stage, whose recipes are training, evaluation and gate; or report.
        """

        @fails_in_one_line
        def lookup(wildcards: Any) -> dict[str, Any]:
            path = f"output/{folder}/{'/'.join(wildcards)}"
            # The report of a recipe has a target of its own.
            jobs = jobs_of_target(self._jobs, path, with_report=False)
            inputs = [self._input(job, self._will_run(job)) for job in jobs]
            parts = [job.manifest for job in jobs] if self._is_report else inputs
            # A model that was built for a page alone has no report yet.
            report = [path.replace("output", "output/report", 1)] if folder in STAGES else []
            missing = [part for part in (*parts, *report) if not Path(part).exists()]
            if missing and self._is_report:
                raise InputError(NOT_REPORTED.format(path, "incomplete"))
            if missing and Path(path).exists():
                self._lacks[self._prefix + path] = missing
            return {"manifests": inputs, **self._stamp.inputs(self._prefix + path in self._lacks)}

        return lookup

    @fails_in_one_line
    def result_of(self, wildcards: Any) -> dict[str, Any]:
        """Input function of a folder or a file of a result: its manifest."""
        path = f"output/{'/'.join(wildcards)}"
        [job] = jobs_of_target(self._jobs, path)
        file = os.path.relpath(path, job.path)
        if job.result is not None and not Path(job.result.folder, file).exists():
            raise InputError(f"{path}: {job.path} has no such file")
        return {"manifest": self._input(job, self._will_run(job)), **self._stamp.inputs(False)}

    @property
    def result_pattern(self) -> str:
        """A regular expression for the folders of results, below output/."""
        return f"({'|'.join(f'{rule.folder}/{rule.names}' for rule in RULES.values())})"

    @fails_in_one_line
    def unnamed_targets(self, wildcards: Any) -> list[str]:
        """Input function of the targets of a build that names none."""
        return default_targets(self._jobs)

    def names(self, section: str, *origins: str) -> str:
        """Return a regular expression for the datasets or models with one of these keys."""
        entries = self.config.values[section].items()
        names = (name for name, entry in entries if not entry.keys().isdisjoint(origins))
        return "|".join(map(re.escape, names)) or "(?!)"

    # --- builds -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Lock the folder before the build is planned.

        The lock replaces Snakemake's own, which outlives a Snakemake that was killed
        (profiles/default).
        """
        check_options(self.workflow)
        lock_output()
        self._is_build = self._jobs.will_run = True
        if self._prefix:
            # Jobs write below output/ of the current folder.
            path = Path(self._prefix, "output")
            if not os.path.lexists(path):
                replace_link(path, os.path.relpath("output", self._prefix))
            elif path.resolve() != Path("output").resolve():
                raise InputError(f"{path} is not a link to output/: move it to another place")
        for store in filter(is_writable, self.config.stores):
            register_root(store, Path("output"))
        # A damaged input makes the job stale that makes it, before any job is planned.
        for job in self._jobs_of(self.workflow.dag_settings.targets or default_targets(self._jobs)):
            _ = job.result

    def start(self) -> None:
        """Write what jobs that were planned are made from: the snapshot, the build, the specs."""
        if not self._is_planned:
            return
        self._is_planned = False
        adapter.restrict_pods(self.workflow)
        self._stamp.start_jobs()
        jobs = self._in_dag(self.workflow.dag.needrun_jobs())
        if not jobs:
            return
        self._ran_jobs = True
        shares_environment = jobs_share_environment(self.workflow)
        mode = self.config.values["hermetic"]
        if shares_environment and self.workflow.executor_plugin.name == "local":
            check_machine(
                mode, ["/".join(job.recipe) for job in jobs if job.placement.gpus_per_node]
            )
        self.snapshot.write(self._build, [job.path for job in jobs if self._is_forced(job)])
        for job in jobs:
            job.write_spec()
            check_link(Path(job.path))
        if shares_environment:
            functions, judges = (
                {name for job in jobs for name in job.spec["settings"].get(key, ())}
                for key in ("reward_functions", "llm_judges")
            )
            import_reward_functions(self.snapshot.folder, functions, mode)
            for name in sorted(judges):
                api_key(name, self.config.values["llm_judges"][name].get("key_env"))

    def _in_dag(self, jobs: Iterable[Any]) -> list[PlannedJob]:
        """Return our jobs that have programs, of jobs in the DAG of Snakemake."""
        return [
            self._jobs[rule, "/".join(job.wildcards)]
            for job in jobs
            if (rule := self._rules.get(job.rule.name, "")) in RULES
        ]

    def finish(self) -> None:
        """Give models their cards and links to evaluation and report, also if no job ran."""
        for job in self._planned_later:
            adapter.forget(self.workflow, self._prefix + job.manifest)
        self._jobs.forget_results()
        models = [job for job in self._in_dag(self.workflow.dag.jobs) if job.row.work == "training"]
        # Another workflow may read these folders: what is written here makes none of them newer.
        times = {job.path: os.stat(job.path) for job in models if os.path.exists(job.path)}
        for job in models:
            stage, name = job.recipe
            parts = (f"evaluate_{stage}", name), ("draw_report", f"{stage}/{name}")
            for part, made in zip(PARTS, map(self._jobs.__getitem__, parts), strict=True):
                if job.result is not None and made.result is not None:
                    link_part(job.path, job.result.folder, part, made.result.folder)
        if models:
            # It takes a second.
            from snakechat.pages.card import write_cards

            write_cards(models)
        for path, status in times.items():
            # Of a team, another user may have made it.
            with suppress(PermissionError):
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        if self._ran_jobs and (limit := self.config.values["store_max_size"]):
            warn_of_size(self.config.stores[0], parse_size(limit))

    # --- planning -----------------------------------------------------------------------------

    @functools.cached_property
    def _stamp(self) -> adapter.Stamp:
        """The input that makes jobs stale, from the first question of Snakemake's plan on."""
        storage = self.workflow.storage_settings.default_storage_provider
        return adapter.Stamp(
            self.workflow.is_main_process, self._is_build, is_flagged=bool(storage or self._prefix)
        )

    @functools.cached_property
    def _is_report(self) -> bool:
        """Whether Snakemake writes a report. It knows its options when it plans."""
        return check_options(self.workflow)

    def _jobs_of(self, words: Iterable[str]) -> set[PlannedJob]:
        """Return the jobs of targets. A recipe's folder stands for it without its report."""
        found: set[PlannedJob] = set()
        for word in words:
            # Others are rules, or paths of another workflow.
            with suppress(InputError):
                target = word.removeprefix(self._prefix)
                found |= {*jobs_of_target(self._jobs, target, with_report=False)}
        return found

    def _find_will_run(self, job: PlannedJob) -> bool:
        """Return whether a job that has a result will run, as far as specs and options say.

        A build links an earlier version of the result here that is up to date.
        """
        is_stale, result = self._is_stale(job), job.result
        is_current = result is not None and is_linked(job.path, result.folder)
        if self._is_report and job.existed and not is_current:
            raise InputError(NOT_REPORTED.format(job.path, "stale"))
        if self._is_build and result is not None and not is_current:
            link_result(job.path, result.folder)
            adapter.forget(self.workflow, self._prefix + job.manifest)
        # All of them are decided.
        return any([self._will_run(upstream) for upstream in job.inputs.values()]) or is_stale

    def _is_stale(self, job: PlannedJob) -> bool:
        """Return whether a result is stale by its spec, or an option asks for the job."""
        return job.is_stale or self._is_forced(job)

    @functools.cached_property
    def _named(self) -> set[str | PlannedJob]:
        """The rules that --force and --forcerun name, and the jobs of the paths."""
        settings = self.workflow.dag_settings
        words: set[Any] = {*settings.forcerun, *(settings.targets if settings.forcetargets else ())}
        # The rule of a recipe's folder stands for those that make it.
        for stage in STAGES:
            if self._names[stage] in words:
                words |= {self._names[f"train_{stage}"], self._names[f"evaluate_{stage}"]}
        return words | self._jobs_of(words)

    def _is_forced(self, job: PlannedJob) -> bool:
        """Return whether --force, --forceall or --forcerun asks for a job."""
        is_named = not self._named.isdisjoint([self._names[job.rule], job])
        return is_named or self.workflow.dag_settings.forceall

    def _changes(self, output: str) -> str:
        """Return why a result or a path that users ask for is stale, or an empty string."""
        if missing := self._lacks.get(output):
            return f"missing {', '.join(missing)}"
        job = self._makes.get(output)
        if job is None or not job.is_stale:
            return ""
        causes = causes_of(job.spec, self.workflow.config_settings.configfiles)
        return "; ".join(causes) or "an input is made again"

    def _placement(self, job: PlannedJob) -> Placement:
        """Return the placement of a job, with the threads that --set-threads gives its rule."""
        option = self.workflow.resource_settings.overwrite_threads.get(self._names[job.rule])
        threads = getattr(option, "raw", None)
        if isinstance(threads, int):
            return replace(job.placement, threads=threads)
        return job.placement
