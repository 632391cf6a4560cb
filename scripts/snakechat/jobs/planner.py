"""The jobs of a build, for programs that explain, estimate or accept: planned in their process.

Jobs, specs and staleness come from the modules that the workflow uses (snakechat.jobs). Only the
jobs of a target are determined a second time: Snakemake derives them from the rules.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from snakechat.config.loading import check_config_files, load_config, project_files
from snakechat.config.recipes import COMPARISON_NAME, RECIPE_NAME, STAGES, Config, JobId
from snakechat.jobs.page_jobs import PAGES
from snakechat.jobs.placements import job_placement, run_options
from snakechat.jobs.plan import Plan, PlannedJob
from snakechat.jobs.rules import RULES, num_wildcards
from snakechat.jobs.specs import Specs
from snakechat.jobs.staleness import Staleness
from snakechat.jobs.targets import default_targets, folder_jobs, warn_of_other_configs
from snakechat.workflow.errors import InputError
from snakechat.workflow.snakemake_command_line import config_options, parse_options, read_config

ROOT = Path(__file__).resolve().parents[3]


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
        )
        for rule, name in jobs
    }
    return Plan(planned, stale_results(specs, jobs, wanted), settings.targets)


def jobs_of_target(config: Config, target: str) -> list[JobId]:
    """Return the jobs that make a target: a folder that users ask for, a result, or a file of it.

    Raises:
        InputError: No job makes it.
    """
    path = Path(os.path.normpath(target))
    output, *words = path.parts or (".",)
    if output == "output" and len(words) == 2 and words[0] in STAGES and is_name(words[1]):
        return [*folder_jobs(config, *words), ("draw_report", "/".join(words))]
    if output == "output" and len(words) == 3 and words[0] in PAGES and target.endswith(".html"):
        path = Path("output/pages", *words)
    result = path
    for suffix in (".manifest.json", ".html", ".md"):
        result = Path(str(result).removesuffix(suffix))
    for folder in (result, *path.parents):
        for rule, (_, root, *_) in RULES.items():
            if folder.is_relative_to(f"output/{root}"):
                name = folder.relative_to(f"output/{root}").as_posix()
                if is_job(config, rule, name):
                    return [(rule, name)]
    raise InputError(f"{target} is not a result: name one, such as output/sft/NAME")


def is_name(text: str) -> bool:
    """Return whether a text can be the name of a recipe rather than of a file."""
    return RECIPE_NAME.fullmatch(text) is not None and not text.endswith((".manifest", ".html"))


def is_job(config: Config, rule: str, name: str) -> bool:
    """Return whether a rule has jobs of such a name. The config need not have it."""
    *stages, last = name.split("/")
    if rule == "draw_page":
        page, *stages = stages or [""]
        names = COMPARISON_NAME if page == "compare" else RECIPE_NAME
        is_stage = len(stages) == 1 and stages[0] in STAGES
        return page in PAGES and is_stage and names.fullmatch(last) is not None
    if len(stages) + 1 != num_wildcards(rule):
        return False
    # Rules of one folder make different datasets or models.
    if RULES[rule].folder == "data":
        return last not in config.values["datasets"] or config.records_job(last)[0] == rule
    if RULES[rule].folder == "models":
        return config.pretrained_model(last)[0] == rule
    return all(stage in STAGES for stage in stages) and RECIPE_NAME.fullmatch(last) is not None


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
