"""The jobs of targets, and of builds for programs that explain, estimate or accept.

Jobs, specs and staleness come from the modules that the workflow uses (snakechat.jobs). The jobs of
a target, and which of them would run, are determined a second time: Snakemake derives them from the
rules.
"""

import argparse
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.config.loading import check_config_files, load_config, project_files
from snakechat.config.recipes import RECIPE_NAME, STAGES, Config, JobId
from snakechat.jobs.model_jobs import PAGES
from snakechat.jobs.rules import RULES, STAGE, job_placement, recipe_of, run_options
from snakechat.jobs.staleness import Specs, Staleness
from snakechat.workflow.errors import InputError
from snakechat.workflow.processes import DEFAULTS, SERIAL, Placement, RunOptions
from snakechat.workflow.snakemake_options import config_options, parse_options, read_config

ROOT = Path(__file__).resolve().parents[3]
FIRST_TARGET = "output/rlhf/tiny"
# Of the path of a manifest beside a result.
SUFFIX = ".manifest.json"

# --- targets --------------------------------------------------------------------------------------


def folder_jobs(config: Config, stage: str, name: str) -> list[JobId]:
    """Return the jobs of the folder output/STAGE/NAME that users ask for, without its report."""
    gate = [] if config.recipe(stage, name)["gate"] is None else [("check_gate", f"{stage}/{name}")]
    return [(f"train_{stage}", name), (f"evaluate_{stage}", name), *gate]


def jobs_of_target(config: Config, target: str) -> list[JobId]:
    """Return the jobs that make a target: a folder that users ask for, a result, or a file of it.

    Raises:
        InputError: No job makes it.
    """
    path = os.path.normpath(target)
    if found := re.fullmatch(f"output/{STAGE}/({RECIPE_NAME.pattern})", path):
        stage, name = found.groups()
        return [*folder_jobs(config, stage, name), ("draw_report", f"{stage}/{name}")]
    if path.endswith(".html"):
        path = re.sub(f"^output/({'|'.join(PAGES)})/", r"output/pages/\1/", path)
    for rule, row in RULES.items():
        # A result, its manifest, its page, or a file of it.
        pattern = rf"output/{row.folder}/(?P<name>{row.names})({re.escape(SUFFIX)}|[.]html|/.*)?"
        if found := re.fullmatch(pattern, path):
            name = found["name"]
            # Rules of one folder make different datasets or models.
            if row.folder == "models":
                return [config.pretrained_model(name)]
            if row.folder == "data" and name in config.values["datasets"]:
                return [config.records_job(name)]
            return [(rule, name)]
    raise InputError(f"{target} is not a result: name one, such as output/sft/NAME")


def default_targets(config: Config) -> list[str]:
    """Return the recipes and pages of the config that have results, or else the tiny recipe.

    The recipes that an RLHF recipe is made from are built with it and are not listed.
    """
    built: list[tuple[str, str]] = []
    for stage in STAGES:
        found = {path.name.removesuffix(SUFFIX) for path in Path("output", stage).glob("[!.]*")}
        built += [(stage, name) for name in config.values[stage]["recipes"] if name in found]
    upstream = {
        recipe_of(*job)
        for stage, name in built
        if stage == "rlhf"
        for rule in ("train_rlhf", "evaluate_rlhf")
        for key, job in RULES[rule].describe(config, name).inputs.items()
        if RULES[job[0]].work == "training" and not key.startswith(("compare_with", "rlhf"))
    }
    targets = [f"output/{stage}/{name}" for stage, name in built if (stage, name) not in upstream]
    for page, stage in itertools.product(PAGES, STAGES):
        names = {*config.values[stage]["recipes"], *config.values["sweeps"], *config.values["logs"]}
        pages = sorted(Path("output", page, stage).glob("*.html"))
        targets += [str(path) for path in pages if names.issuperset(path.stem.split("-vs-"))]
    return targets or [FIRST_TARGET]


# --- plans ----------------------------------------------------------------------------------------


class PlannedJob(NamedTuple):
    """A job of a build.

    Attributes:
        spec: Its spec.
        placement: Where and how it would run.
        options: What else its run would use.
        program: Name of its program in scripts/.
    """

    spec: dict[str, Any]
    placement: Placement = SERIAL
    options: RunOptions = DEFAULTS
    program: str = ""


class Plan(NamedTuple):
    """The jobs of a build that is planned and not run yet.

    Attributes:
        jobs: All jobs by the path of their result, up-to-date ones included. Jobs follow those
            upstream.
        stale: Paths of the results that the build would make.
        targets: The targets of the command line.
        configfiles: The config files of the command line.
    """

    jobs: Mapping[str, PlannedJob]
    stale: set[str]
    targets: Sequence[str] = ()
    configfiles: Sequence[Path] = ()

    @property
    def stale_jobs(self) -> dict[str, PlannedJob]:
        """The jobs that the build would run, by the path of their result."""
        return {path: job for path, job in self.jobs.items() if path in self.stale}


def plan_parser(description: str | None, usage: str = "") -> argparse.ArgumentParser:
    """Return the parser of a tool that plans. It leaves the words of plan_build unknown.

    usage: Its own options, with a space at the end.
    """
    return argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"%(prog)s [-h] {usage}[targets and options of snakemake]",
        allow_abbrev=False,
    )


def plan_build(words: list[str]) -> Plan:
    """Plan `snakemake WORDS`, in the folder of the build from now on.

    Raises:
        InputError: The config, an option or a target is invalid.
    """
    options, command_line = parse_options(words)
    named = [path.absolute() for path in options.configfile or ()]
    files = [*project_files(ROOT), *named]
    check_config_files(files)
    values = read_config(files, command_line)
    if options.directory is not None:
        os.chdir(options.directory)
    config = load_config(values, ROOT, ROOT, command_line)
    targets = options.targets or default_targets(config)
    specs = Specs(config, ROOT)
    wanted = [job for target in targets for job in jobs_of_target(config, target)]
    jobs = with_upstream(specs, wanted)
    config_words = config_options(words)
    planned = {
        specs.result(rule, name): PlannedJob(
            specs.spec(rule, name)[0],
            job_placement(config, rule, name),
            run_options(config, rule, specs.describe(rule, name), config_words),
            specs.program(rule, name),
        )
        for rule, name in jobs
    }
    return Plan(planned, stale_results(specs, jobs, wanted), options.targets, named)


def upstream_paths(spec: Mapping[str, Any], jobs: Mapping[str, Any]) -> list[str]:
    """Return the paths of a job's inputs that are results of planned jobs."""
    paths = [entry["path"] for entry in spec["inputs"].values()]
    return [path for path in paths if path in jobs]


def with_upstream(specs: Specs, wanted: Iterable[JobId]) -> list[JobId]:
    """Return jobs and all jobs upstream of them, in the order of their stages.

    Each job follows those that it reads.
    """
    depths: dict[JobId, int] = {}

    def depth(job: JobId) -> int:
        if job not in depths:
            depths[job] = 1 + max(map(depth, specs.describe(*job).inputs.values()), default=0)
        return depths[job]

    for job in wanted:
        depth(job)
    return sorted(depths, key=lambda job: (depths[job], specs.result(*job)))


def stale_results(specs: Specs, jobs: Iterable[JobId], wanted: Iterable[JobId]) -> set[str]:
    """Return the paths of the results that a build would make.

    A result is made if it is stale, if it is missing and something that is made or wanted reads it,
    or if a result that it reads is made.

    Args:
        specs: The specs of all jobs.
        jobs: The jobs; each follows those that it reads.
        wanted: The jobs of the targets.
    """
    staleness = Staleness(specs)
    for job in jobs:
        staleness.decide(*job)
    made = {job for job in jobs if specs.result(*job) in staleness.stale}
    made |= {job for job in wanted if staleness.result(*job) is None}
    before = -1
    while len(made) > before:
        before = len(made)
        for job in jobs:
            inputs = specs.describe(*job).inputs.values()
            if job in made:
                made |= {up for up in inputs if staleness.result(*up) is None}
            elif not made.isdisjoint(inputs):
                made.add(job)
    return {specs.result(*job) for job in made}
