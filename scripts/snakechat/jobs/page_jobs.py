"""Describes the jobs that draw pages, and those that run models on the prompts of users.

A function has the name of the rule whose jobs it describes.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

from snakechat.config.recipes import STAGES, Config, ConfigError
from snakechat.data.hub import normalized_license
from snakechat.jobs.data_jobs import Description, Jobs
from snakechat.jobs.model_jobs import benchmarks_of, models_of
from snakechat.workflow.links import find_version, is_version
from snakechat.workflow.manifest import MANIFEST

# Pages below output/ that users ask for, each drawn from a result of its own: PAGE/STAGE/NAME.html.
PAGES = ("compare", "prompt_eval", "rw_eval")


def draw_report(config: Config, stage: str, name: str) -> Description:
    models, recipes = models_of(config, stage, name), {stage: name}
    if stage == "reward":
        # No benchmark measures the language model behind a reward model.
        models = {stage: models[stage]}
    if stage == "rlhf":
        recipes = {each: models[each][1] for each in STAGES if each in models}
        # Of several reward recipes behind it, the report shows the first one.
        rewards = config.reward_models(name, "reward").values()
        recipes |= dict([each for each in rewards if each.section == "reward"][:1])
    datasets = sorted(
        {dataset for recipe in recipes.items() for dataset, _ in config.blend(*recipe)}
    )
    return Description(
        settings=_page_settings(config, "report", stage, name),
        inputs={
            **{f"records.{dataset}": config.records_job(dataset) for dataset in datasets},
            **{f"tokens.{stage}": (f"tokenize_{stage}", name) for stage, name in recipes.items()},
            **{f"train_{stage}": (f"train_{stage}", name) for stage, name in recipes.items()},
            **{f"evaluate_{stage}": (f"evaluate_{stage}", name) for stage, name in recipes.items()},
            **benchmarks_of(config, stage, name, models),
        },
        options={"licenses": declared_licenses(config)},
    )


@cache
def declared_licenses(config: Config) -> dict[str, str]:
    """Return the licences that the config declares, by the path of the import or the fetch.

    They are not settings of these jobs, since a licence does not change the data.
    """
    declared = {
        f"output/{folder}/{name}": normalized_license(entry.get("license"))
        for section, folder in (("datasets", "data"), ("models", "models"))
        for name, entry in config.values[section].items()
    }
    return {path: license for path, license in declared.items() if license}


def prompt_eval(config: Config, stage: str, name: str) -> Description:
    settings = {"dtype": config.recipe(stage, name)["dtype"], **config.values["prompt_eval"]}
    return _on_prompts(config, stage, name, "prompts", models_of(config, stage, name), settings)


def rw_eval(config: Config, name: str) -> Description:
    models = {"base": config.base_model("reward", name), "model": ("train_reward", name)}
    return _on_prompts(config, "reward", name, "prompts/pairs", models, {})


def _on_prompts(
    config: Config, stage: str, name: str, folder: str, models: Jobs, settings: dict[str, Any]
) -> Description:
    """Return the description of a job that runs models on sets of prompts.

    folder: Where the sets are, in the folder of the user or else of the workflow.
    """
    source = config.root if (config.root / "prompts").is_dir() else config.sources
    _, model = config.tokenizer_model(stage, name)
    names = config.values["models"][model].get("prompt_sets", config.values["prompt_sets"])
    paths = [f"{folder}/{prompt_set}.yaml" for prompt_set in names]
    return Description(
        settings={
            "seed": config.recipe(stage, name)["seed"],
            "prompt_sets": names,
            "template": config.template(stage, name),
            **settings,
        },
        inputs=models,
        files={path: source / path for path in paths},
        options={"source": os.path.relpath(source)},
    )


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
    inputs: Jobs = {}
    for recipe in trained:
        inputs[f"training.{recipe}"] = (f"train_{stage}", recipe)
        inputs[f"evaluation.{recipe}"] = (f"evaluate_{stage}", recipe)
        inputs |= benchmarks_of(config, stage, recipe)
    # The files and folders of versions and logs, which jobs do not make.
    files: dict[str, Path] = {}
    places: dict[str, dict[str, str]] = {}
    for recipe in filter(is_version, recipes):
        version = find_version(stage, recipe)
        # The manifests have the digests of the files that a comparison reads.
        manifests = {kind: folder / MANIFEST for kind, folder in version.items()}
        files |= {f"{recipe}/{kind}/{MANIFEST}": path for kind, path in manifests.items()}
        places[recipe] = {kind: str(folder) for kind, folder in version.items()}
    for name in filter(logs.__contains__, recipes):
        path = files[f"{name}/log"] = config.local_path(logs[name])
        places[name] = {"log": str(path)}
    return Description(
        settings=_page_settings(config, "compare", stage, names) | {"recipes": recipes},
        inputs=inputs,
        files=files,
        options={"versions": places},
    )


def _page_settings(config: Config, page: str, stage: str, name: str) -> dict[str, Any]:
    """Return the settings of all pages; the name is a part of the page."""
    return {"page": page, "stage": stage, "name": name, "language": config.values["language"]}
