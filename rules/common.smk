# Helpers of the rules: the checked config, and where things run and lie.

import errno
import json
import os
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import jsonschema
import yaml
from snakemake.logging import logger

ROOT = Path(workflow.basedir)
sys.path.insert(0, str(ROOT / "scripts"))

from rlhf.code import code_digests
from rlhf.digests import canonical_json
from rlhf.formats import columns_of, has_pairs
from rlhf.lock import Locked, hold

STAGES = ("sft", "reward", "dpo", "rlhf")
# No blank, no slash, no dot in front: no name leads out of output/ or needs quoting.
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"


wildcard_constraints:
    name=rf"{NAME}(?<!\.json)",
    stage="|".join(STAGES),


# True of every folder that a user asks for: the job before put it there (rules without a command).
logger.addFilter(
    lambda record: "were not present when the DAG was created" not in record.getMessage()
)


def fail(message):
    """Stop planning with one line."""
    sys.exit(f"error: {message}")


# Ctrl-C and a cluster's SIGTERM reach a whole job. The shell waits while a program saves its state,
# and so does tee, by the trap in each command: its last words are shown and kept. set: Snakemake's
# own prefix, which this one takes the place of; a program that fails is a job that fails. OMP: threads
# that wait for each other sleep. Spinning, they would keep others from the cores that these need.
shell.prefix("set -euo pipefail; trap 'exit 143' TERM; export OMP_WAIT_POLICY=PASSIVE; ")


# Instead of Snakemake's own lock, which outlives a Snakemake that was killed (profiles/default).
onstart:
    try:
        hold("output/.lock")
    except Locked as other:
        fail(f"{other} is building in {Path.cwd()}: wait for it, or stop it")


# --- config ---------------------------------------------------------------------------------


def check_config():
    """Stop at the first thing in the config that the schema refuses, naming its key."""
    schema = yaml.safe_load((ROOT / "rules/config.schema.yaml").read_text())
    # An integer is one as Python has it: programs count with it, where 2.0 would not do.
    types = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: type(value) is int
    )
    validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=types)
    formats = jsonschema.FormatChecker(["regex"])
    errors = validator(schema, format_checker=formats).iter_errors(config)
    error = jsonschema.exceptions.best_match(errors)
    if error:
        key = ".".join(map(str, error.absolute_path)) or "top level"
        hint = ""
        if error.validator == "type" and isinstance(error.instance, str):
            hint = " (YAML reads 1e-5 as text: write 1.0e-5)"
        fail(f"config: {key}: {error.message}{hint}")


def entry(section, name, used_by):
    """The entry of a section (datasets, rlhf.presets), or a line that says which names there are."""
    entries = config
    for key in section.split("."):
        entries = entries[key]
    if name not in entries:
        known = ", ".join(sorted(entries)) or "none"
        fail(f"config: {used_by} names {name!r}, which is not under {section} (there: {known})")
    return entries[name]


def recipe(stage, name):
    """The settings of a recipe: the stage's defaults, its preset's, then what it states itself."""
    recipes = config[stage]["recipes"]
    if name not in recipes:
        fail(f"config: {stage}.recipes has no {name!r} (there: {', '.join(recipes)})")
    defaults, own = config[stage]["defaults"], recipes[name]
    preset = own.get("preset", defaults.get("preset"))
    used_by = f"{stage}.recipes.{name}.preset"
    between = {} if preset is None else entry(f"{stage}.presets", preset, used_by)
    settings = {"seed": config["seed"], **defaults, **between, **own}
    settings.pop("preset", None)
    return settings


def placement(stage, key):
    """A resource of a stage's jobs, as a function of the wildcards."""

    def lookup(wildcards):
        return recipe(stage, wildcards.name)["placement"][key]

    return lookup


def gpus(stage):
    """GPUs of a whole job: nodes times GPUs in each."""

    def lookup(wildcards):
        where = recipe(stage, wildcards.name)["placement"]
        return where["nodes"] * where["gpus_per_node"]

    return lookup


def placement_json(stage):
    """What a program is told of its placement: never part of the spec."""

    def lookup(wildcards):
        where = {**recipe(stage, wildcards.name)["placement"], "save_steps": config["save_steps"]}
        return canonical_json(where)

    return lookup


def launch(stage):
    """What starts the training of a stage: one process, or one for each GPU of a node."""

    def lookup(wildcards, threads):
        where = recipe(stage, wildcards.name)["placement"]
        processes = where["gpus_per_node"]
        if where["nodes"] > 1 or processes < 2:
            return "python"
        # Together they have the threads of the job. Asked to stop, each has an hour to save.
        each = max(threads // processes, 1)
        return (
            f"OMP_NUM_THREADS={each} MKL_NUM_THREADS={each} python {shlex.quote(program('launch'))}"
            f" --standalone --nproc-per-node {processes} --shutdown-timeout 3600"
        )

    return lookup


def zero_placement(wildcards, threads):
    """A recipe's placement, with what starts its training."""
    where = recipe(wildcards.stage, wildcards.name)["placement"]
    return canonical_json({**where, "launch": launch(wildcards.stage)(wildcards, threads)})


def program(rule):
    """Path of the program of a rule, from the working directory."""
    return os.path.relpath(ROOT / f"scripts/{rule}.py")


def check_references():
    """Stop if a recipe names a model, dataset or recipe that the config does not have."""
    for name, dataset in config["datasets"].items():
        try:
            if "format" in dataset:
                columns_of(dataset["format"], dataset.get("columns"))
        except ValueError as error:
            fail(f"config: datasets.{name}: {error}")
    for name, model in config["models"].items():
        if "train_on" in model.get("tokenizer", {}):
            entry("datasets", model["tokenizer"]["train_on"], f"models.{name}.tokenizer")
    for stage in STAGES:
        for name in config[stage]["recipes"]:
            settings = recipe(stage, name)
            for dataset, _ in blend(stage, name):
                check_use(dataset, stage, f"{stage}.recipes.{name}.datasets")
            if stage == "rlhf":
                check_models(name, settings)
                check_scores(name, settings)
            else:
                base_model(stage, name)


def check_use(dataset, stage, used_by):
    """Stop if a dataset has nothing for a stage that names it."""
    settings = entry("datasets", dataset, used_by)
    phase = "reward" if stage == "dpo" else stage
    if not split_weights(dataset)[phase]:
        fail(f"config: {used_by} names {dataset}, whose split gives no rows to {phase}")
    pairs = "generate" in settings or has_pairs(settings["format"], settings.get("columns"))
    if phase == "reward" and not pairs:
        fail(
            f"config: {used_by} names {dataset}, which has no rejected answers (format"
            f" {settings['format']}): it can serve sft and the prompts of rlhf"
        )


def check_models(name, settings):
    """Stop if the models of a recipe would read a dialogue or its tokens differently."""
    actor = template("sft", settings["actor"])
    for key in ("reward", "judge"):
        other = actor if settings[key] is None else template("reward", settings[key])
        if other != actor:
            fail(
                f"config: rlhf.recipes.{name}: actor and {key} have the templates"
                f" {actor} and {other}"
            )
    if settings["ptx"] is not None:
        models = [tokenizer_model("sft", settings[key])[1] for key in ("actor", "ptx")]
        if models[0] != models[1]:
            fail(
                f"config: rlhf.recipes.{name}.ptx names {settings['ptx']}, whose rows are tokens of"
                f" {models[1]}; the actor's are those of {models[0]}"
            )


def check_scores(name, settings):
    """Stop if nothing scores the answers of a recipe, or too few of them are compared."""
    place, samples = f"config: rlhf.recipes.{name}", settings["samples"]
    if settings["reward"] is None and not settings["reward_functions"]:
        fail(f"{place}.reward is null and there are no reward_functions: nothing scores answers")
    for function in settings["reward_functions"]:
        trouble = reward_function_trouble(function)
        if trouble:
            fail(f"{place}.reward_functions: {trouble}")
    if settings["algorithm"] != "ppo" and samples < 2:
        fail(
            f"{place}.samples: {settings['algorithm']} compares the answers to a prompt, and needs"
            f" 2 or more ({samples} given)"
        )
    if settings["global_batch_size"] % samples:
        fail(
            f"{place}.global_batch_size: {settings['global_batch_size']} is not a multiple of"
            f" samples ({samples}): the answers to a prompt stay together"
        )


@cache
def reward_function_trouble(name):
    """What is wrong with rewards/NAME.py, as far as it can be told without running it; or None."""
    there = sorted(path.stem for path in (ROOT / "rewards").glob("*.py"))
    if name not in there:
        return f"there is no rewards/{name}.py (there: {', '.join(there) or 'none'})"
    try:
        code_digests(ROOT / "scripts/train_rlhf.py", [name])
    except SyntaxError as error:
        return f"rewards/{name}.py is no valid Python (line {error.lineno}: {error.msg})"
    except ValueError as error:
        return f"rewards/{name}.py is no valid Python ({error})"
    except FileNotFoundError as error:
        return f"rewards/{name}.py imports a module that is not there ({error.filename})"


def base_model(stage, name):
    """The job that makes the model which a recipe starts from: a base model or sft/RECIPE."""
    model = recipe(stage, name)["model"]
    if model.startswith("sft/") and stage != "sft":
        recipe("sft", model.removeprefix("sft/"))
        return "train_sft", model.removeprefix("sft/")
    origin = entry("models", model, f"{stage}.recipes.{name}.model")
    return ("fetch_model" if "hub" in origin else "init_model"), model


def tokenizer_model(stage, name):
    """The job of the base model whose tokenizer a recipe uses, behind any sft/RECIPE."""
    if stage == "rlhf":
        return tokenizer_model("sft", recipe("rlhf", name)["actor"])
    made_by, model = base_model(stage, name)
    return tokenizer_model("sft", model) if made_by == "train_sft" else (made_by, model)


def template(stage, name):
    """How dialogues become text for the base model behind a recipe: dialogue or chat."""
    _, model = tokenizer_model(stage, name)
    return config["models"][model].get("template", config["template"])


def blend(stage, name):
    """[dataset, weight] of each dataset of a recipe; without a weight of its own it weighs 1."""
    named = [
        item if isinstance(item, dict) else {item: 1} for item in recipe(stage, name)["datasets"]
    ]
    blended = [[dataset, weight] for item in named for dataset, weight in item.items()]
    if len(blended) > len({dataset for dataset, _ in blended}):
        fail(f"config: {stage}.recipes.{name}.datasets names a dataset twice: give it a weight")
    return blended


def split_weights(dataset):
    """Shares of the phases in a dataset's rows: its own, or those of all."""
    return config["datasets"][dataset].get("split", config["split"]["weights"])


def local_path(path):
    """A path of the config, which is told from the Snakefile's folder, wherever the output goes."""
    return Path(os.path.relpath(ROOT / Path(path).expanduser()))


def source_of(dataset):
    """The local folder or file of a dataset; None where it comes from elsewhere."""
    path = config["datasets"][dataset].get("path")
    return None if path is None else local_path(path)


def dataset_place(wildcards):
    source = source_of(wildcards.name)
    folder = source and str(source.parent if source.is_file() else source)
    return canonical_json({"source": folder})


def tokenizer_place(wildcards):
    path = config["models"][wildcards.name]["tokenizer"].get("path")
    return canonical_json({"source": path and str(local_path(path))})


def models_from(origin):
    """Constraint on names: the models that come from this origin."""
    return "|".join(re.escape(n) for n, m in config["models"].items() if origin in m) or "(?!)"


def built_targets():
    """Recipes with a result under output/ and their pages, or the tiny one; a chat model stands
    for its parts.
    """
    built = [
        (stage, name)
        for stage in STAGES
        for name in config[stage]["recipes"]
        if Path(f"output/{stage}/{name}.manifest.json").exists()
    ]
    parts = set()
    for stage, name in built:
        if stage == "rlhf":
            settings = recipe(stage, name)
            parts |= {("sft", settings["actor"])}
            parts |= {("reward", settings["reward"]), ("reward", settings["judge"])}
    targets = [f"output/{stage}/{name}" for stage, name in built if (stage, name) not in parts]
    pages = (
        page
        for stage, name in built
        for page in (f"output/record/{stage}/{name}.md", f"output/zero/{stage}/{name}.html")
    )
    targets += [page for page in pages if Path(page).exists()]
    return targets or ["output/rlhf/tiny"]


check_config()
check_references()
