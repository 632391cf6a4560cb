"""Targets of a command line, and the jobs of builds that tools explain, estimate or accept.

Jobs, specs and staleness come from the modules that the workflow uses (snakechat.jobs). The jobs of
a target, and which of them would run, are determined a second time: Snakemake derives them from the
rules.
"""

import argparse
import itertools
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from snakechat.config.loading import check_config_files, load_config, project_files
from snakechat.config.recipes import RECIPE_NAME, STAGES, Reference
from snakechat.jobs.model_jobs import PAGES
from snakechat.jobs.rules import RULES, STAGE
from snakechat.jobs.staleness import Jobs, PlannedJob, with_upstream
from snakechat.workflow.errors import InputError, tool_parser
from snakechat.workflow.snakemake_options import config_options, parse_options, read_config

ROOT = Path(__file__).resolve().parents[3]
FIRST_TARGET = "output/rlhf/tiny"
# The paths of a rule: a result, its manifest, its page, or a file of it.
PATHS = {
    rule: re.compile(rf"output/{row.folder}/(?P<name>{row.names})([.]manifest[.]json|[.]html|/.*)?")
    for rule, row in RULES.items()
}

# --- targets --------------------------------------------------------------------------------------


def jobs_of_target(jobs: Jobs, target: str, with_report: bool = True) -> list[PlannedJob]:
    """Return the jobs that make a target: a folder that users ask for, a result, or a file of it.

    A recipe's folder stands for its training, its evaluation, its gate if it has one, and its
    report, if that is asked for. Raises InputError if no job makes the target.
    """
    path = os.path.normpath(target)
    if found := re.fullmatch(f"output/{STAGE}/({RECIPE_NAME.pattern})", path):
        stage, name = found.groups()
        has_gate = jobs.config.recipe(stage, name)["gate"] is not None
        others = [("check_gate", has_gate), ("draw_report", with_report)]
        model = [jobs[f"{verb}_{stage}", name] for verb in ("train", "evaluate")]
        return [*model, *(jobs[rule, f"{stage}/{name}"] for rule, is_made in others if is_made)]
    if path.endswith(".html"):
        path = re.sub(f"^output/({'|'.join(PAGES)})/", r"output/pages/\1/", path)
    for rule, pattern in PATHS.items():
        if found := pattern.fullmatch(path):
            name = found["name"]
            # Rules of one folder make different datasets or models.
            if RULES[rule].folder == "models":
                return [jobs[jobs.config.model_job(Reference("models", name))]]
            if RULES[rule].folder == "data" and name in jobs.config.values["datasets"]:
                return [jobs[jobs.config.records_job(name)]]
            return [jobs[rule, name]]
    raise InputError(f"{target} is not a result: name one, such as output/sft/NAME")


def default_targets(jobs: Jobs) -> list[str]:
    """Return the recipes and pages of the config that have results, or else the tiny recipe.

    The recipes that an RLHF recipe is made from are built with it and are not listed.
    """
    values = jobs.config.values
    built = [
        (stage, name)
        for stage in STAGES
        for name in values[stage]["recipes"]
        if any(os.path.lexists(f"output/{stage}/{name}{end}") for end in ("", ".manifest.json"))
    ]
    upstream = {
        job.recipe
        for stage, name in built
        if stage == "rlhf"
        for rule in ("train_rlhf", "evaluate_rlhf")
        for key, job in jobs[rule, name].inputs.items()
        if job.row.work == "training" and not key.startswith(("compare_with", "rlhf"))
    }
    targets = [f"output/{stage}/{name}" for stage, name in built if (stage, name) not in upstream]
    for page, stage in itertools.product(PAGES, STAGES):
        names = {*values[stage]["recipes"], *values["sweeps"], *values["logs"]}
        pages = sorted(Path("output", page, stage).glob("*.html"))
        targets += [str(path) for path in pages if names.issuperset(path.stem.split("-vs-"))]
    return targets or [FIRST_TARGET]


# --- plans ----------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """The jobs of a build that is planned and not run yet.

    Attributes:
        jobs: All jobs by the path of their result, up-to-date ones included. Each follows those
            that it reads.
        stale: The jobs that the build would run, by the path of their result.
        targets: The targets of the command line.
        configfiles: The config files of the command line.
    """

    jobs: Mapping[str, PlannedJob]
    stale: Mapping[str, PlannedJob]
    targets: Sequence[str] = ()
    configfiles: Sequence[Path] = ()


def plan_parser(description: str | None, usage: str = "") -> argparse.ArgumentParser:
    """Return the parser of a tool that plans. It leaves the words of plan_build unknown.

    usage: Its own options, with a space at the end.
    """
    words = f"%(prog)s [-h] {usage}[targets and options of snakemake]"
    return tool_parser(description, usage=words, allow_abbrev=False)


def plan_build(words: list[str]) -> Plan:
    """Plan `snakemake WORDS`, in the folder of the build from now on.

    Raises InputError if the config, an option or a target is invalid.
    """
    options, command_line = parse_options(words)
    for name in ("force", "forceall", "forcerun", "until", "omit_from", "batch"):
        if getattr(options, name):
            raise InputError(
                f"--{name.replace('_', '-')} has no effect here: the jobs are those that are stale"
            )
    named = [path.absolute() for path in options.configfile or ()]
    files = [*project_files(ROOT), *named]
    check_config_files(files)
    values = read_config(files, command_line)
    if options.directory is not None:
        os.chdir(options.directory)
    jobs = Jobs(load_config(values, ROOT, ROOT, command_line), ROOT, config_options(words))
    targets = options.targets or default_targets(jobs)
    wanted = [job for target in targets for job in jobs_of_target(jobs, target)]
    planned = {job.path: job for job in with_upstream(wanted)}
    made = jobs_to_run(planned.values(), wanted)
    stale = {path: job for path, job in planned.items() if job in made}
    return Plan(planned, stale, options.targets, named)


def jobs_to_run(jobs: Collection[PlannedJob], wanted: Iterable[PlannedJob]) -> set[PlannedJob]:
    """Return the jobs that a build would run.

    A result is made if it is stale, if it is missing and wanted or read by a job that runs, or if a
    result that it reads is made.

    jobs, wanted: All jobs, and the jobs of the targets.
    """
    made = set[PlannedJob]()
    found = {job for job in jobs if job.is_stale} | {job for job in wanted if job.result is None}
    while found != made:
        made = found
        found = made | {job for job in jobs if not made.isdisjoint(job.inputs.values())}
        found |= {each for job in made for each in job.inputs.values() if each.result is None}
    return made
