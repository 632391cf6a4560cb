# Helpers of the rules: the checked config, and where things run and lie.

import errno
import itertools
import json
import os
import re
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

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


@cache
def config_schema():
    return yaml.safe_load((ROOT / "rules/config.schema.yaml").read_text())


def check_config(values, schema, *place):
    """Stop at the first thing in the config, or at a place in it, that a schema refuses."""
    # An integer is one as Python has it: programs count with it, where 2.0 would not do.
    types = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: type(value) is int
    )
    validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=types)
    formats = jsonschema.FormatChecker(["regex"])
    errors = validator(schema, format_checker=formats).iter_errors(values)
    error = jsonschema.exceptions.best_match(errors)
    if error:
        key = ".".join(map(str, [*place, *error.absolute_path])) or "top level"
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
    """The settings of a recipe: the stage's defaults, its preset's, then what it states itself.

    Its placement is complete: where it names a deployment, that one, with what is said on top.
    """
    recipes = config[stage]["recipes"]
    if name not in recipes:
        fail(f"config: {stage}.recipes has no {name!r} (there: {', '.join(recipes)})")
    defaults, own = config[stage]["defaults"], recipes[name]
    preset = own.get("preset", defaults.get("preset"))
    used_by = f"{stage}.recipes.{name}.preset"
    between = {} if preset is None else entry(f"{stage}.presets", preset, used_by)
    settings = {"seed": config["seed"], **defaults, **between, **own}
    settings.pop("preset", None)
    where, layers = {}, {"defaults": defaults, f"presets.{preset}": between, f"recipes.{name}": own}
    for layer, stated in layers.items():
        where = placed(where, stated.get("placement", {}), f"{stage}.{layer}.placement")
    if config["deployment"] is not None:
        where = entry("deployments", config["deployment"], "deployment")
    return {**settings, "placement": where}


def placed(where, stated, used_by):
    """A placement with another on top: the name of a deployment, or keys and maybe such a name."""
    own = {"deployment": stated} if isinstance(stated, str) else dict(stated)
    name = own.pop("deployment", None)
    return {**(where if name is None else entry("deployments", name, used_by)), **own}


def check_placements():
    """Stop if a placement, with all that it stands on, is one that cannot be."""
    schema = config_schema()
    for stage in STAGES:
        kind = "rlhf_placement" if stage == "rlhf" else "placement"
        complete = {"$ref": f"#/$defs/complete_{kind}", "$defs": schema["$defs"]}
        for name in config[stage]["recipes"]:
            place = (stage, "recipes", name, "placement")
            check_config(recipe(stage, name)["placement"], complete, *place)


# --- where jobs run -------------------------------------------------------------------------


def place_of(stage, wildcards, alone):
    """The placement of a stage's job; alone: of one process, on one GPU of it at most."""
    where = recipe(stage or wildcards.stage, wildcards.name)["placement"]
    if not alone:
        return where
    gpus = where["gpus_per_node"]
    each = max(where["threads"] // max(gpus, 1), 1)
    return {**where, "nodes": 1, "gpus_per_node": min(gpus, 1), "threads": each}


def threads_of(stage=None, alone=False):
    """CPU threads of a stage's jobs on each node, as a function of the wildcards."""
    return lambda wildcards: place_of(stage, wildcards, alone)["threads"]


def resources_of(stage=None, alone=False):
    """Resources of a stage's jobs, each a function of the wildcards; None: the job has no such one.

    stage: None where it is a wildcard. gpu: of the whole job. The other names are those of the
    plugin for Slurm.
    """

    def asked(tell):
        def lookup(wildcards, attempt):
            where = place_of(stage, wildcards, alone)
            return tell(SimpleNamespace(**where, many=where["nodes"] > 1, attempt=attempt))

        return lookup

    return {
        # Never fewer GPUs on one node than on another, nor one node's worth spread over two.
        "nodes": asked(lambda job: job.nodes),
        "gpu": asked(lambda job: None if job.many else job.gpus_per_node or None),
        "gres": asked(
            lambda job: f"gpu:{job.gpus_per_node}" if job.many and job.gpus_per_node else None
        ),
        # The plugin then leaves it to the launcher to start a task on each node.
        "mpi": asked(lambda job: "srun" if job.many else None),
        "tasks": asked(lambda job: job.nodes if job.many else None),
        "tasks_per_gpu": asked(lambda job: 0 if job.many else None),
        "mem_mb": asked(lambda job: grown(job.mem_mb, job.attempt)),
        "runtime": asked(lambda job: grown(job.runtime, job.attempt)),
    }


def grown(asked, attempt):
    """Half more for each attempt after the first."""
    return asked * (1 + attempt) // 2


def placement_json(stage=None, alone=False, **more):
    """What a program is told of its placement: never part of the spec."""

    def lookup(wildcards):
        where = {**place_of(stage, wildcards, alone), "save_steps": config["save_steps"], **more}
        return canonical_json(where)

    return lookup


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
    for model in settings["beside"]:
        stage, _, other = model.partition("/")
        if other not in config[stage]["recipes"]:
            known = ", ".join(config[stage]["recipes"])
            fail(f"config: rlhf.recipes.{name}.beside: {stage} has no {other!r} (there: {known})")
        if tokenizer_model(stage, other) != tokenizer_model("rlhf", name):
            fail(f"config: rlhf.recipes.{name}.beside: {model} reads other tokens than {name}")
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


def swept(sweep):
    """{name: settings} of the recipes of a sweep: one for each combination of its values."""
    settings = config["sweeps"][sweep]
    origin = entry(f"{settings['stage']}.recipes", settings["recipe"], f"sweeps.{sweep}.recipe")
    made = {}
    for values in itertools.product(*settings["over"].values()):
        own = dict(zip(settings["over"], values, strict=True))
        name = "-".join([sweep, *(f"{key}-{value}" for key, value in own.items())])
        if not re.fullmatch(NAME, name):
            fail(f"config: sweeps.{sweep}.over: {name!r} is no name of a recipe: no such values")
        made[name] = {**origin, **own}
    return made


def add_sweeps():
    """Put the recipes of all sweeps beside the others."""
    for sweep, settings in config["sweeps"].items():
        recipes = config[settings["stage"]]["recipes"]
        if sweep in recipes:
            fail(f"config: sweeps.{sweep} has the name of a recipe of {settings['stage']}")
        for name, made in swept(sweep).items():
            if name in recipes:
                fail(f"config: sweeps.{sweep} makes recipe {name}, which is there already")
            recipes[name] = made


def compared(stage, names):
    """The recipes that a comparison names, joined by -vs-; a sweep stands for all of its own."""
    found = []
    for name in names.split("-vs-"):
        sweep = config["sweeps"].get(name)
        found += swept(name) if sweep and sweep["stage"] == stage else [name]
    for name in found:
        recipe(stage, name)
    if len(set(found)) < 2:
        fail(f"output/compare/{stage}/{names}: name two recipes, A-vs-B, or a sweep")
    return list(dict.fromkeys(found))


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
    pages = [
        f"output/{folder}/{stage}/{name}.{kind}"
        for stage, name in built
        for folder, kind in (
            ("record", "md"),
            ("zero", "html"),
            ("prompt_eval", "html"),
            ("rw_eval", "html"),
        )
    ]
    targets += [page for page in pages if Path(page).exists()]
    targets += [
        str(page)
        for page in sorted(Path("output/compare").glob("*/*.html"))
        if all(is_known(page.parent.name, name) for name in page.stem.split("-vs-"))
    ]
    return targets or ["output/rlhf/tiny"]


def is_known(stage, name):
    """Whether the config has a recipe or a sweep of this name."""
    return stage in STAGES and (name in config[stage]["recipes"] or name in config["sweeps"])


check_config(config, config_schema())
add_sweeps()
check_config(config, config_schema())
check_references()
check_placements()
