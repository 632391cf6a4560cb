"""Describes the jobs that draw pages, and those that run models on the prompts of users.

A function has the name of the rule whose jobs it describes.
"""

import os
from typing import Any

from snakechat.config.recipes import Config
from snakechat.config.references import Reference
from snakechat.config.schema import ConfigError
from snakechat.jobs.descriptions import Description, command_job
from snakechat.jobs.files import declared_licenses, prompt_set_files, prompt_source
from snakechat.jobs.model_jobs import benchmarks_of, models_of, train_reward
from snakechat.workflow.links import find_version, is_version
from snakechat.workflow.manifest import MANIFEST

# Pages below output/ that users ask for, each drawn from a result of its own: PAGE/STAGE/NAME.html.
PAGES = ("compare", "prompt_eval", "rw_eval")


def run_benchmark(config: Config, benchmark: str, section: str, name: str) -> Description:
    keys = config.recipe("benchmarks", benchmark)
    description = command_job(config, keys, f"benchmarks.{benchmark}")
    description.settings["metrics"] = keys["metrics"]
    return description._replace(inputs={"model": config.model_job(Reference(section, name))})


def draw_report(config: Config, stage: str, name: str) -> Description:
    recipes = _reported_recipes(config, stage, name)
    # No benchmark measures the language model behind a reward model.
    models = {} if stage == "reward" else models_of(config, stage, name)
    models[stage] = (f"train_{stage}", name)
    datasets = sorted(
        {dataset for stage, name in recipes.items() for dataset, _ in config.blend(stage, name)}
    )
    return Description(
        settings=_page_settings(config, "report", stage, name),
        inputs={
            **{f"records.{dataset}": config.records_job(dataset) for dataset in datasets},
            **{f"tokens.{stage}": (f"tokenize_{stage}", name) for stage, name in recipes.items()},
            **{
                f"{verb}_{stage}": (f"{verb}_{stage}", name)
                for stage, name in recipes.items()
                for verb in ("train", "evaluate")
            },
            **benchmarks_of(config, stage, name, models),
        },
        options={"licenses": declared_licenses(config)},
    )


def _reported_recipes(config: Config, stage: str, name: str) -> dict[str, str]:
    """Return the recipes whose results the report of a recipe shows, by stage.

    Of several reward recipes behind an RLHF recipe, it shows the first one.
    """
    if stage != "rlhf":
        return {stage: name}
    rewards = config.reward_models(name, "reward").values()
    trained = [model.name for model in rewards if model.section == "reward"]
    recipes = dict(config.recipe_chain(*config.origin("rlhf", name)))
    return recipes | {**({"reward": trained[0]} if trained else {}), "rlhf": name}


def prompt_eval(config: Config, stage: str, name: str) -> Description:
    recipe = config.recipe(stage, name)
    return Description(
        settings={
            "dtype": recipe["dtype"],
            **_prompt_settings(config, stage, name),
            **config.values["prompt_eval"],
        },
        inputs=models_of(config, stage, name),
        files=prompt_set_files(config, "prompts", stage, name),
        options={"source": os.path.relpath(prompt_source(config))},
    )


def rw_eval(config: Config, name: str) -> Description:
    return Description(
        settings=_prompt_settings(config, "reward", name),
        inputs={
            "base": train_reward(config, name).inputs["model"],
            "model": ("train_reward", name),
        },
        files=prompt_set_files(config, "prompts/pairs", "reward", name),
        options={"source": os.path.relpath(prompt_source(config))},
    )


def _prompt_settings(config: Config, stage: str, name: str) -> dict[str, Any]:
    """Return the settings that prompt_eval and rw_eval have in common."""
    return {
        "seed": config.recipe(stage, name)["seed"],
        "prompt_sets": config.prompt_sets(stage, name),
        "template": config.template(stage, name),
    }


def draw_page(config: Config, page: str, stage: str, name: str) -> Description:
    if page == "compare":
        return _comparison(config, stage, name)
    if (page == "rw_eval") != (stage == "reward"):
        models = "a reward model" if page == "rw_eval" else "a chat model: sft, dpo or rlhf"
        raise ConfigError(f"output/{page}/{stage}/{name}.html: {page} needs {models}")
    job = ("rw_eval", name) if page == "rw_eval" else ("prompt_eval", f"{stage}/{name}")
    return Description(_page_settings(config, page, stage, name), inputs={"results": job})


def _comparison(config: Config, stage: str, names: str) -> Description:
    recipes, logs = config.compared_recipes(stage, names), config.values["logs"]
    trained = [recipe for recipe in recipes if not is_version(recipe) and recipe not in logs]
    versions = {recipe: find_version(stage, recipe) for recipe in recipes if is_version(recipe)}
    found = {name: config.local_path(logs[name]) for name in recipes if name in logs}
    for name, path in found.items():
        if not path.is_file():
            raise ConfigError(f"config: logs.{name}: {path} does not exist: correct the path")
    return Description(
        settings=_page_settings(config, "compare", stage, names) | {"recipes": recipes},
        inputs={
            f"{result}.{recipe}": (f"{verb}_{stage}", recipe)
            for result, verb in (("training", "train"), ("evaluation", "evaluate"))
            for recipe in trained
        }
        | {
            key: job
            for recipe in trained
            for key, job in benchmarks_of(config, stage, recipe).items()
        },
        files={
            # The manifests have the digests of the files that a comparison reads.
            f"{recipe}/{kind}/{MANIFEST}": folder / MANIFEST
            for recipe, version in versions.items()
            for kind, folder in version.items()
        }
        | {f"{name}/log": path for name, path in found.items()},
        options={
            "versions": {
                recipe: {kind: str(folder) for kind, folder in version.items()}
                for recipe, version in versions.items()
            }
            | {name: {"log": str(path)} for name, path in found.items()}
        },
    )


def _page_settings(config: Config, page: str, stage: str, name: str) -> dict[str, Any]:
    """Return the settings of all pages; the name is a part of the page."""
    return {"page": page, "stage": stage, "name": name, "language": config.values["language"]}
