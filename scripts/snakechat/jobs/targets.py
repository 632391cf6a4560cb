"""What targets consist of, and the targets of a build that names none."""

import os
from pathlib import Path

from snakechat.config.recipes import STAGES, Config, JobId
from snakechat.workflow.errors import warn

# Folder and suffix of the pages that users ask for, by recipe.
PAGES = {"prompt_eval": "html", "rw_eval": "html"}
FIRST_TARGET = "output/rlhf/tiny"


def folder_jobs(config: Config, stage: str, name: str) -> list[JobId]:
    """Return the jobs of the folder output/STAGE/NAME that users ask for, without its report."""
    gate = [] if config.recipe(stage, name)["gate"] is None else [("check_gate", f"{stage}/{name}")]
    return [(f"train_{stage}", name), (f"evaluate_{stage}", name), *gate]


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
    upstream: set[tuple[str, str]] = set()
    for stage, name in built:
        if stage == "rlhf":
            upstream |= {*config.recipe_chain(*config.origin("rlhf", name))}
            teacher = config.teacher(name)
            upstream |= {teacher} if teacher else set()
            upstream |= {
                (model.section, model.name)
                for key in ("reward", "judge")
                for model in config.reward_models(name, key).values()
            }
    targets = [f"output/{stage}/{name}" for stage, name in built if (stage, name) not in upstream]
    pages = [
        f"output/{folder}/{stage}/{name}.{suffix}"
        for stage, name in built
        for folder, suffix in PAGES.items()
    ]
    targets += [page for page in pages if Path(page).exists()]
    targets += [
        str(page)
        for page in sorted(Path("output/compare").glob("*/*.html"))
        if all(_exists(config, page.parent.name, name) for name in page.stem.split("-vs-"))
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
