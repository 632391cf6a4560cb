# The config, the specs of jobs, commands and functions of wildcards, for all other files.

import copy
import functools
import inspect
import os
import re
import sys
from pathlib import Path

# The folder of the Snakefile, which relative paths of the config start from; and that of the code.
ROOT, SOURCES = Path(workflow.basedir), Path(BUILD["sources"])

from snakechat.config.llm_judges import check_keys
from snakechat.config.loading import load_config
from snakechat.config.recipes import COMPARISON_NAME, RECIPE_NAME, STAGES
from snakechat.jobs.descriptions import RULES
from snakechat.jobs.files import unread_files_remark
from snakechat.jobs.placements import (
    RESOURCES,
    hardware,
    job_resources,
    program_placement,
    recipe_of,
)
from snakechat.jobs.specs import Specs
from snakechat.jobs.staleness import Staleness
from snakechat.jobs.targets import default_targets, folder_jobs, results_of_other_configs
from snakechat.workflow import snakemake_adapter
from snakechat.workflow.digests import canonical_json
from snakechat.workflow.errors import (
    NOT_IN_CONFIG,
    InputError,
    describe_environment_error,
    warn,
)
from snakechat.workflow.gpus import has_gpu
from snakechat.workflow.kubernetes_pods import restrict_pods
from snakechat.workflow.locks import AlreadyLocked, acquire_lock
from snakechat.workflow.preflight import (
    check_folders,
    check_gpus,
    import_reward_functions,
    no_gpu,
)
from snakechat.workflow.snapshot import Build, delete_old_snapshots, take_snapshot
from snakechat.workflow.spec_files import spec_path, write_spec


wildcard_constraints:
    name=RECIPE_NAME.pattern,
    stage="|".join(STAGES),


def fail(message):
    """Stop planning with one line."""
    sys.exit(f"error: {message}")


def fails_in_one_line(function):
    """Have a function that Snakemake calls stop with one line at an error that users can act on."""

    @functools.wraps(function)
    def call(*arguments, **named):
        try:
            return function(*arguments, **named)
        except InputError as error:
            fail(error)
        except OSError as error:
            fail(describe_environment_error(error, "output", {}) or error)

    # Snakemake asks for the signature of each function once per job.
    call.__signature__ = inspect.signature(function)
    return call


@fails_in_one_line
def prepare():
    """Check Snakemake's version and the config; return config, snapshot, specs and staleness."""
    snakemake_adapter.check_version()
    for folder in (ROOT, Path.cwd()):
        snakemake_adapter.check_path(folder)
    snakemake_adapter.collect_garbage_rarely()
    snakemake_adapter.hide_messages(workflow)
    snakemake_adapter.keep_published_files()
    snakemake_adapter.repeat_errors()
    snakemake_adapter.refuse_listings(workflow)
    snakemake_adapter.explain_rule_targets()
    snakemake_adapter.complete_targets(workflow)
    snakemake_adapter.use_shared_volume(workflow)
    if "config" in BUILD:
        config.clear()
        config.update(BUILD["config"])
    command_line = BUILD.get("command_line", snakemake_adapter.command_line_config(workflow))
    values = copy.deepcopy(config)
    checked = load_config(config, ROOT, SOURCES, command_line)
    checked.listings |= BUILD.get("listings", {})
    try:
        snapshot = take_snapshot(SOURCES)
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from None
    build = Build(str(snapshot.folder.absolute()), values, command_line, forced=[], listings={})
    specs = Specs(checked, SOURCES)
    staleness = Staleness(specs)
    snakemake_adapter.before_report(workflow, staleness.start_report)
    return checked, snapshot, build, specs, staleness


CONFIG, SNAPSHOT, PLANNED_BUILD, SPECS, STALENESS = prepare()

# Snakemake uses the image with --sdm apptainer alone.
if CONFIG.values["container"]:

    container: CONFIG.values["container"]


# The file of the build, for its jobs; on a cluster, in the environment of the submitted command. It
# is written when the first job starts.
if workflow.is_main_process:
    os.environ.update(SNAKECHAT_BUILD=str(PLANNED_BUILD.path))


envvars:
    "SNAKECHAT_BUILD",


# Ctrl-C and a cluster's SIGTERM reach a whole job. The shell and tee ignore them while a program
# saves its state, so that its last messages are printed and logged. The first words are Snakemake's
# own prefix, which this one replaces: a job fails if its program fails.
shell.prefix("set -euo pipefail; trap 'exit 143' TERM; ")

# The command of all rules. The launcher publishes a result that exists already; otherwise it starts
# the processes that the placement has.
# The launcher empties the log of a result that is replaced; a job that keeps its result adds a line.
LAUNCHER = f"{SNAPSHOT.folder}/scripts/launch.py"
TO_LOG = " 2>&1 | (trap '' INT TERM; tee -a {log:q})"
ARGUMENTS = "{params.program:q} --spec {params.spec:q} --placement {params.placement:q}"
RUN = f"SNAKECHAT_LOG={{log:q}} PYTHONSAFEPATH= python {LAUNCHER} {ARGUMENTS}{TO_LOG}"
# The end of a command that writes a page, which appears as a whole.
TO_PAGE = " {output.page:q}.tmp && mv {output.page:q}.tmp {output.page:q}"

# The options with which a result is rebuilt, for its model card and for verify.py.
OPTIONS = snakemake_adapter.config_options()
# The spec files of planned jobs, by the paths of the manifests.
SPEC_FILES = {}


@fails_in_one_line
def start_build():
    """Lock the folder, and write what the jobs are made from: the snapshot, the build, the specs.

    Planning alone writes nothing. The lock replaces Snakemake's own, which outlives a Snakemake that
    was killed (profiles/default).
    """
    snakemake_adapter.check_scheduler(workflow)
    restrict_pods(workflow)
    snakemake_adapter.count_steps(workflow)
    try:
        acquire_lock("output/.lock")
    except AlreadyLocked as other:
        fail(f"{other} is building in {Path.cwd()}: wait for it, or stop it")
    if WITHOUT_GPU and snakemake_adapter.jobs_share_environment(workflow):
        check_gpus(WITHOUT_GPU[0])
    jobs = [job for job in snakemake_adapter.jobs_to_run(workflow) if job.rule in RULES]
    specs = [SPECS.spec(job.rule, job.name)[0] for job in jobs]
    forced = [spec["path"] for job, spec in zip(jobs, specs) if job.forced]
    try:
        SNAPSHOT.write()
        PLANNED_BUILD._replace(forced=forced, listings=CONFIG.listings).write()
        for spec in specs:
            write_spec(spec)
    except OSError as error:
        # The error of a full disk names no file.
        place = error.filename or "output"
        raise InputError(f"{place} cannot be written: {error.strerror}") from None
    check_folders(spec["path"] for spec in specs)
    STALENESS.link()
    delete_old_snapshots(SNAPSHOT.folder)
    if snakemake_adapter.jobs_share_environment(workflow):
        functions, judges = (
            {name for spec in specs for name in spec["settings"].get(key, ())}
            for key in ("reward_functions", "llm_judges")
        )
        import_reward_functions(SNAPSHOT.folder, functions)
        check_keys(CONFIG.values["llm_judges"], judges)


onstart:
    start_build()


@fails_in_one_line
def finish_build():
    """Link earlier versions that are up to date, also if no job had to run, and write model cards."""
    STALENESS.link()
    recipes = [
        (stage, name)
        for stage in STAGES
        for name in snakemake_adapter.planned_names(workflow, f"train_{stage}")
    ]
    if recipes:
        # It takes a second.
        from snakechat.reporting.card_writing import write_cards

        write_cards(SPECS, recipes)


snakemake_adapter.after_build(workflow, finish_build)


def name_of(wildcards):
    """Return the name of a job, NAME or STAGE/NAME."""
    return "/".join(wildcards)


# Snakemake asks for the inputs of a job several times.
@functools.cache
def warn_of_unread_files(rule, dataset):
    """Print a warning if a dataset to import has data files that belong to no split."""
    is_planned = rule == "import_dataset" and workflow.is_main_process
    remark = unread_files_remark(CONFIG, dataset) if is_planned else None
    if remark:
        warn(remark)


def inputs(rule):
    """Input function of rules, with the manifests of the upstream jobs.

    The wildcards are the name of the job: NAME, or STAGE/NAME.
    """

    @fails_in_one_line
    def lookup(wildcards):
        snakemake_adapter.check_command(workflow)
        snakemake_adapter.decide_staleness(workflow, changes)
        name = name_of(wildcards)
        STALENESS.decide(rule, name)
        spec, spec_digest = SPECS.spec(rule, name)
        warn_of_unread_files(rule, name)
        SPEC_FILES[SPECS.manifest(rule, name)] = str(spec_path(rule, name, spec_digest))
        return {
            key: SPECS.manifest(upstream["rule"], upstream["name"])
            for key, upstream in spec["inputs"].items()
        }

    return lookup


def spec_file(wildcards, output):
    """Return the path of the spec file of a job, whose inputs are known already."""
    return SPEC_FILES[output[0]]


def results_of(stage, jobs):
    """Input function of a folder that users ask for: the manifests of the jobs that write it.

    jobs: a function of the wildcards.
    """

    @fails_in_one_line
    def lookup(wildcards):
        snakemake_adapter.check_command(workflow)
        snakemake_adapter.decide_staleness(workflow, changes)
        name = name_of(wildcards)
        folder = f"output/{stage}/{name}"
        manifests = [SPECS.manifest(*job) for job in jobs(*wildcards)]
        snakemake_adapter.force_inputs(workflow, stage, folder, manifests)
        STALENESS.decide_folder(folder, manifests)
        return {"manifests": [ancient(path) for path in manifests]}

    return lookup


def recipe_results(stage):
    """Input function of the folder of a recipe: training, evaluation and gate."""
    return results_of(stage, lambda name: folder_jobs(CONFIG, stage, name))


def changes(output):
    """Return why a result or a folder of results is stale, or an empty string."""
    if missing := STALENESS.incomplete.get(output):
        return f"missing {', '.join(missing)}"
    spec = STALENESS.stale.get(output.removesuffix(".manifest.json"))
    if not spec:
        return ""
    # Imported only where something is stale.
    from snakechat.planning.causes import causes_of

    return "; ".join(causes_of(spec))


@fails_in_one_line
def unnamed_targets(wildcards):
    """Input function of the targets of a build that names none."""
    if other := results_of_other_configs(CONFIG):
        warn(f"{NOT_IN_CONFIG} {', '.join(other)}: add the --configfile of their build to see them")
    return default_targets(CONFIG)


def entries_with(section, *origins):
    """Return a regular expression for the datasets or models with one of these keys.

    Without any, it matches no name.
    """
    return "|".join(map(re.escape, CONFIG.entries_with(section, *origins))) or "(?!)"


# Snakemake asks for each resource of a job several times.
@functools.cache
def cached_hardware(rule, name):
    return hardware(CONFIG, rule, name)


def threads_of(rule):
    """Return a function of wildcards: CPU threads of a job of a recipe on each node."""

    @fails_in_one_line
    def lookup(wildcards):
        return cached_hardware(rule, name_of(wildcards))["threads"]

    return lookup


def resources_of(rule):
    """Return the resources of a job of a recipe, each a function of wildcards and attempt."""

    def resource(key):
        @fails_in_one_line
        def lookup(wildcards, attempt):
            return job_resources(cached_hardware(rule, name_of(wildcards)), attempt)[key]

        return lookup

    return {key: resource(key) for key in RESOURCES}


# Recipes whose planned jobs need a GPU, on a machine that seems to have none.
WITHOUT_GPU = []


def warn_without_gpu(recipe):
    """Print a warning if a job that runs on this machine needs a GPU and there is none, once."""
    if not WITHOUT_GPU and snakemake_adapter.jobs_run_here(workflow) and not has_gpu():
        WITHOUT_GPU.append(recipe)
        warn(no_gpu(recipe))


def params_of(rule):
    """Return the words of a job's command: its program, spec file and placement."""

    @fails_in_one_line
    def placement(wildcards):
        name = name_of(wildcards)
        found = program_placement(CONFIG, rule, name, OPTIONS)
        if found.get("gpus_per_node"):
            warn_without_gpu("/".join(recipe_of(rule, name)))
        return canonical_json(found)

    return {
        "spec": spec_file,
        "program": f"{SNAPSHOT.folder}/scripts/{RULES[rule].program}.py",
        "placement": placement,
    }
