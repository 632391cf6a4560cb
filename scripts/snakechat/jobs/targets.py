"""What targets consist of, and the targets of a build that names none."""

import os
from pathlib import Path

from snakechat.config.recipes import COMPARISON_NAME, RECIPE_NAME, STAGES, Config, JobId
from snakechat.jobs.page_jobs import PAGES
from snakechat.jobs.rules import RULES, num_wildcards, recipe_of
from snakechat.workflow.errors import InputError, warn

FIRST_TARGET = "output/rlhf/tiny"


def folder_jobs(config: Config, stage: str, name: str) -> list[JobId]:
    """Return the jobs of the folder output/STAGE/NAME that users ask for, without its report."""
    gate = [] if config.recipe(stage, name)["gate"] is None else [("check_gate", f"{stage}/{name}")]
    return [(f"train_{stage}", name), (f"evaluate_{stage}", name), *gate]


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
    if rule == "run_benchmark":
        benchmark, section = stages
        return benchmark in config.values["benchmarks"] and section in (*STAGES, "models")
    # Rules of one folder make different datasets or models.
    if RULES[rule].folder == "data":
        return last not in config.values["datasets"] or config.records_job(last)[0] == rule
    if RULES[rule].folder == "models":
        return config.pretrained_model(last)[0] == rule
    return all(stage in STAGES for stage in stages) and RECIPE_NAME.fullmatch(last) is not None


def default_targets(config: Config) -> list[str]:
    """Return the recipes and pages that have results, or else the tiny recipe.

    The recipes that an RLHF recipe is made from are built with it and are not listed.
    """
    built = [
        (stage, name)
        for stage in STAGES
        for name in config.values[stage]["recipes"]
        if any(os.path.lexists(f"output/{stage}/{name}{end}") for end in ("", ".manifest.json"))
    ]
    upstream = {
        recipe_of(*job)
        for stage, name in built
        if stage == "rlhf"
        for rule in ("train_rlhf", "evaluate_rlhf")
        for key, job in RULES[rule].describe(config, name).inputs.items()
        if RULES[job[0]].work == "training" and not key.startswith(("compare_with", "rlhf"))
    }
    targets = [f"output/{stage}/{name}" for stage, name in built if (stage, name) not in upstream]
    targets += [
        str(path)
        for page in PAGES
        for path in sorted(Path("output", page).glob("*/*.html"))
        if all(_exists(config, path.parent.name, name) for name in path.stem.split("-vs-"))
    ]
    return targets or [FIRST_TARGET]


def warn_of_other_configs(config: Config) -> None:
    """Print a warning if recipes have results that the config does not have."""
    others = [
        f"{stage}/{name}"
        for stage in STAGES
        for path in sorted(Path("output", stage).glob("*.manifest.json"))
        if (name := path.name.removesuffix(".manifest.json")) not in config.values[stage]["recipes"]
    ]
    if others:
        names = ", ".join(others)
        warn(f"not in this config: {names}: add the --configfile of their build to see them")


def _exists(config: Config, stage: str, name: str) -> bool:
    """Return whether the config has a recipe or a sweep of this name."""
    return stage in STAGES and (
        name in config.values[stage]["recipes"] or name in config.values["sweeps"]
    )
