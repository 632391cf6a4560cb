"""The jobs of a build, for programs that explain, estimate or accept: planned in their process.

Jobs, specs and staleness come from the modules that the workflow uses (snakechat.jobs). Only the
jobs of a target are determined a second time: Snakemake derives them from the rules.
"""

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.config.loading import check_config_files, load_config, project_files
from snakechat.config.recipes import JobId
from snakechat.jobs.placements import job_placement, run_options
from snakechat.jobs.specs import Specs
from snakechat.jobs.staleness import Staleness
from snakechat.jobs.targets import default_targets, jobs_of_target, warn_of_other_configs
from snakechat.workflow.placement import DEFAULTS, SERIAL, Placement, RunOptions
from snakechat.workflow.snakemake_command_line import config_options, parse_options, read_config

ROOT = Path(__file__).resolve().parents[3]


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
    """

    jobs: Mapping[str, PlannedJob]
    stale: set[str]
    targets: Sequence[str] = ()

    @property
    def stale_jobs(self) -> dict[str, PlannedJob]:
        """The jobs that the build would run, by the path of their result."""
        return {path: job for path, job in self.jobs.items() if path in self.stale}


def plan_parser(description: str | None, usage: str = "") -> argparse.ArgumentParser:
    """Return the parser of a tool that plans. Its unknown words are those of plan_build.

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
    settings = parse_options(words)
    files = [*project_files(ROOT), *settings.configfiles]
    check_config_files(files)
    values = read_config(files, settings.config)
    if settings.directory is not None:
        os.chdir(settings.directory)
    config = load_config(values, ROOT, ROOT, settings.config)
    targets = settings.targets
    if not targets:
        warn_of_other_configs(config)
        targets = default_targets(config)
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
    return Plan(planned, stale_results(specs, jobs, wanted), settings.targets)


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
