"""What rules ask of a build: inputs, parameters and resources of jobs, and its start and its end.

Snakemake calls these functions while it plans, and several times for a job. A mistake of a user is
one line. Only rules/common.smk uses this module.
"""

import copy
import functools
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from snakechat.config.llm_judges import check_keys
from snakechat.config.loading import load_config
from snakechat.config.recipes import STAGES
from snakechat.jobs.descriptions import Job
from snakechat.jobs.files import unread_files_remark
from snakechat.jobs.placements import (
    RESOURCES,
    job_placement,
    job_resources,
    recipe_of,
    run_options,
)
from snakechat.jobs.rules import RULES
from snakechat.jobs.specs import Specs
from snakechat.jobs.staleness import Staleness
from snakechat.jobs.targets import default_targets, folder_jobs, warn_of_other_configs
from snakechat.workflow import snakemake_adapter, snakemake_command_line
from snakechat.workflow.digests import Identity, canonical_json, file_identity
from snakechat.workflow.errors import (
    InputError,
    describe_environment_error,
    warn,
)
from snakechat.workflow.kubernetes_pods import restrict_pods
from snakechat.workflow.links import PARTS, link_part, register_root
from snakechat.workflow.locks import AlreadyLocked, acquire_lock
from snakechat.workflow.placement import Placement, changed_values, placement_values
from snakechat.workflow.preflight import (
    check_folders,
    check_gpus,
    import_reward_functions,
)
from snakechat.workflow.snapshot import Build, delete_old_snapshots, take_snapshot
from snakechat.workflow.spec_files import spec_path, write_spec
from snakechat.workflow.store import is_writable
from snakechat.workflow.store_space import warn_of_size

# The lock of the build.
LOCK = Path("output/.lock")
# A function of the wildcards of a job; its other arguments are those that Snakemake knows by name.
RuleFunction = Callable[..., Any]


def fails_in_one_line(function: RuleFunction) -> RuleFunction:
    """Have a function that Snakemake calls stop with one line at an error that users can act on."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except InputError as error:
            sys.exit(f"error: {error}")
        except OSError as error:
            sys.exit(f"error: {describe_environment_error(error, 'output', {}) or error}")

    # Snakemake asks for the signature of each function once per job.
    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return call


def identity_of(path: Path) -> Identity | None:
    """Return what each use of a lock changes, or None if the file does not exist."""
    try:
        return file_identity(path)
    except FileNotFoundError:
        return None


def name_of(wildcards: Any) -> str:
    """Return the name of a job, NAME or STAGE/NAME."""
    return "/".join(wildcards)


class RuleFunctions:
    """The functions that rules call.

    Args:
        workflow: The workflow of Snakemake, which this class adapts.
        config: The config of Snakemake. On a cluster, the config of the build replaces it.
        planned: On a cluster, the build that submitted this job, as its file has it; otherwise the
            folder of the sources.
        root: The folder of the Snakefile, which relative paths of the config start from.

    Attributes:
        config: The checked config.
        snapshot: The sources that jobs run.
        build_file: The file that jobs plan with.
    """

    def __init__(
        self, workflow: Any, config: dict[str, Any], planned: dict[str, Any], root: Path
    ) -> None:
        self.workflow, sources = workflow, Path(planned["sources"])
        self._lock_before = identity_of(LOCK)
        snakemake_adapter.check_version()
        for folder in (root, Path.cwd()):
            snakemake_adapter.check_path(folder)
        snakemake_adapter.adapt(workflow)
        if "config" in planned:
            config.clear()
            config.update(planned["config"])
        command_line = planned.get(
            "command_line", snakemake_command_line.command_line_config(workflow)
        )
        values = copy.deepcopy(config)
        self.config = load_config(config, root, sources, command_line)
        try:
            self.snapshot = take_snapshot(sources)
        except OSError as error:
            raise InputError(f"{error.filename}: {error.strerror}") from None
        copied = str(self.snapshot.folder.absolute())
        self._build = Build(copied, values, command_line, forced=[])
        self.build_file = str(self._build.path)
        self._specs = Specs(self.config, sources)
        self._staleness = Staleness(self._specs)
        snakemake_adapter.before_report(workflow, self._staleness.start_report)
        snakemake_adapter.after_build(workflow, fails_in_one_line(self.finish))
        # The options with which a result is rebuilt, for its model card.
        self._options = snakemake_command_line.config_options()
        # The spec files of planned jobs, by the paths of the manifests.
        self._spec_files: dict[str, str] = {}
        self._ran_jobs = False
        self._placement = functools.cache(self._find_placement)
        self._warn_of_unread_files = functools.cache(self._find_unread_files)

    # --- jobs ---------------------------------------------------------------------------------

    def inputs(self, rule: str) -> RuleFunction:
        """Return an input function: the manifests of the upstream jobs, by the program's names."""

        @fails_in_one_line
        def lookup(wildcards: Any) -> dict[str, str]:
            self._check_build()
            name = name_of(wildcards)
            self._staleness.decide(rule, name)
            spec, spec_digest = self._specs.spec(rule, name)
            self._warn_of_unread_files(rule, name)
            path = str(spec_path(rule, name, spec_digest))
            self._spec_files[self._specs.manifest(rule, name)] = path
            return {
                key: self._specs.manifest(upstream["rule"], upstream["name"])
                for key, upstream in spec["inputs"].items()
            }

        return lookup

    def params(self, rule: str) -> dict[str, Any]:
        """Return the words of a job's command: its program, spec file, placement and options."""

        @fails_in_one_line
        def placement(wildcards: Any) -> str:
            return canonical_json(placement_values(self._placement(rule, name_of(wildcards))))

        @fails_in_one_line
        def options(wildcards: Any) -> str:
            found = run_options(self.config, rule, name_of(wildcards), self._options)
            return canonical_json(changed_values(found))

        def spec_file(wildcards: Any, output: Any) -> str:
            # Snakemake has asked for the inputs already.
            return self._spec_files[output[0]]

        program = f"{self.snapshot.folder}/scripts/{RULES[rule].program or rule}.py"
        return {
            "spec": spec_file,
            "program": program,
            "placement": placement,
            "options": options,
        }

    def threads(self, rule: str) -> RuleFunction:
        """Return a function of wildcards: CPU threads of a job of a recipe on each node."""

        @fails_in_one_line
        def lookup(wildcards: Any) -> int:
            return self._placement(rule, name_of(wildcards)).threads

        return lookup

    def resources(self, rule: str) -> dict[str, RuleFunction]:
        """Return the resources of a job of a recipe, each a function of wildcards and attempt."""

        def resource(key: str) -> RuleFunction:
            @fails_in_one_line
            def lookup(wildcards: Any, attempt: int) -> int | str | None:
                return job_resources(self._placement(rule, name_of(wildcards)), attempt)[key]

            return lookup

        return {key: resource(key) for key in RESOURCES}

    # --- targets ------------------------------------------------------------------------------

    def results(self, stage: str, jobs: Callable[..., list[Job]]) -> RuleFunction:
        """Return an input function of a path that users ask for: the manifests of its jobs.

        jobs: Returns the jobs, given the wildcards.
        """

        @fails_in_one_line
        def lookup(wildcards: Any) -> dict[str, list[Any]]:
            self._check_build()
            name = name_of(wildcards)
            folder = f"output/{stage}/{name}"
            manifests = [self._specs.manifest(*job) for job in jobs(*wildcards)]
            snakemake_adapter.force_inputs(self.workflow, stage, folder, manifests)
            # A model that was built for a page alone has no report yet.
            report = [f"output/report/{stage}/{name}"] if stage in STAGES else []
            self._staleness.decide_folder(folder, [*manifests, *report])
            return {"manifests": snakemake_adapter.without_times(manifests)}

        return lookup

    def recipe_results(self, stage: str) -> RuleFunction:
        """Return the input function of a recipe: training, evaluation and gate."""
        return self.results(stage, lambda name: folder_jobs(self.config, stage, name))

    @fails_in_one_line
    def unnamed_targets(self, wildcards: Any) -> list[str]:
        """Input function of the targets of a build that names none."""
        warn_of_other_configs(self.config)
        return default_targets(self.config)

    def names(self, section: str, *origins: str) -> str:
        """Return a regular expression for the datasets or models with one of these keys.

        Without any, it matches no name.
        """
        entries = self.config.entries_with(section, *origins)
        return "|".join(map(re.escape, entries)) or "(?!)"

    # --- start and end ------------------------------------------------------------------------

    @fails_in_one_line
    def start(self) -> None:
        """Lock the folder, and write what jobs are made from: the snapshot, the build, the specs.

        Planning alone writes nothing. The lock replaces Snakemake's own, which outlives a Snakemake
        that was killed (profiles/default).
        """
        restrict_pods(self.workflow)
        self._lock()
        self._ran_jobs = True
        planned = snakemake_adapter.jobs_to_run(self.workflow)
        jobs = [job for job in planned if job.rule in RULES]
        shares_environment = snakemake_adapter.jobs_share_environment(self.workflow)
        if shares_environment and self.workflow.executor_plugin.name == "local":
            check_gpus(
                "/".join(recipe_of(job.rule, job.name))
                for job in jobs
                if self._placement(job.rule, job.name).gpus_per_node
            )
        specs = [self._specs.spec(job.rule, job.name)[0] for job in jobs]
        forced = [spec["path"] for job, spec in zip(jobs, specs, strict=True) if job.forced]
        try:
            self.snapshot.write()
            self._build._replace(forced=forced).write()
            for spec in specs:
                write_spec(spec)
        except OSError as error:
            # The error of a full disk names no file.
            place = error.filename or "output"
            raise InputError(f"{place} cannot be written: {error.strerror}") from None
        check_folders(self.config.stores[0], specs)
        for store in self.config.stores:
            if is_writable(store):
                register_root(store, Path("output"))
        self._staleness.link()
        delete_old_snapshots(self.snapshot.folder)
        if shares_environment:
            functions, judges = (
                {name for spec in specs for name in spec["settings"].get(key, ())}
                for key in ("reward_functions", "llm_judges")
            )
            import_reward_functions(self.snapshot.folder, functions)
            check_keys(self.config.values["llm_judges"], judges)

    def _lock(self) -> None:
        """Lock the folder for this process.

        Raises:
            InputError: Another build runs in it, or did since this one was planned.
        """
        was_used = identity_of(LOCK) != self._lock_before
        try:
            acquire_lock(LOCK)
        except AlreadyLocked as other:
            raise InputError(
                f"{other} is building in {Path.cwd()}: wait for it, or stop it"
            ) from None
        if was_used:
            raise InputError("another build ran here since this one was planned: start it again")

    def finish(self) -> None:
        """Link earlier versions that are up to date, also if no job ran, and complete models.

        The folder of a model gets its card, and links to its evaluation and its report.
        """
        self._staleness.link()
        current = Staleness(self._specs)
        recipes = [
            (stage, name)
            for stage in STAGES
            for name in snakemake_adapter.planned_names(self.workflow, f"train_{stage}")
        ]
        for stage, name in recipes:
            model = current.result(f"train_{stage}", name)
            jobs = (f"evaluate_{stage}", name), ("draw_report", f"{stage}/{name}")
            for part, job in zip(PARTS, jobs, strict=True):
                made = current.result(*job)
                if model is not None and made is not None:
                    link_part(f"output/{stage}/{name}", model.folder, part, made.folder)
        if recipes:
            # It takes a second.
            from snakechat.pages.card import write_cards

            write_cards(self._specs, recipes)
        if self._ran_jobs:
            warn_of_size(self.config.stores[0], self.config.store_max_bytes)

    # --- planning -----------------------------------------------------------------------------

    def _check_build(self) -> None:
        """Check options and decide what is stale; Snakemake knows both at its first question."""
        snakemake_command_line.check_command(self.workflow)
        snakemake_adapter.decide_staleness(self.workflow, self._changes)
        self._staleness.checks_files = self.workflow.is_main_process and not self.workflow.dryrun

    def _changes(self, output: str) -> str:
        """Return why a result or a path that users ask for is stale, or an empty string."""
        if missing := self._staleness.incomplete.get(output):
            return f"missing {', '.join(missing)}"
        spec = self._staleness.stale.get(output.removesuffix(".manifest.json"))
        if not spec:
            return ""
        # Imported only where something is stale.
        from snakechat.jobs.stale_causes import causes_of

        return "; ".join(causes_of(spec)) or "made from other inputs"

    def _find_placement(self, rule: str, name: str) -> Placement:
        """Return the placement of a job, with the threads that --set-threads gives its rule."""
        placement = job_placement(self.config, rule, name)
        threads = snakemake_command_line.threads_option(self.workflow, rule)
        return placement if threads is None else replace(placement, threads=threads)

    def _find_unread_files(self, rule: str, dataset: str) -> None:
        """Print a warning if a dataset to import has data files that belong to no split."""
        is_planned = rule == "import_dataset" and self.workflow.is_main_process
        remark = unread_files_remark(self.config, dataset) if is_planned else None
        if remark:
            warn(remark)
