# Helpers of the rules: the checked config, and the spec of each job.
#
# A spec is the canonical JSON of all that determines a job's result, the digests of its upstream
# jobs' specs among it. Staleness is decided here, by comparing the spec with the manifest of the
# result on disk, and told to Snakemake by the one thing that it always looks at: file times. The
# default profile leaves it no other trigger.

import json
import os
import re
import sys
from functools import cache
from pathlib import Path

import jsonschema
import yaml

ROOT = Path(workflow.basedir)
sys.path.insert(0, str(ROOT / "scripts"))

from rlhf.digests import (
    DigestCache,
    canonical_json,
    code_digests,
    digest,
    file_digest,
    requirements_digest,
    write_atomically,
)

# No blank, no slash, no dot in front: no name leads out of output/ or needs quoting.
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"


wildcard_constraints:
    name=rf"{NAME}(?<!\.json)",


def fail(message):
    """Stop planning with one line."""
    sys.exit(f"error: {message}")


# --- config ---------------------------------------------------------------------------------


def check_config():
    """Stop at the first thing in the config that the schema refuses, naming its key."""
    schema = yaml.safe_load((ROOT / "rules/config.schema.yaml").read_text())
    errors = jsonschema.Draft202012Validator(schema).iter_errors(config)
    error = jsonschema.exceptions.best_match(errors)
    if error:
        key = ".".join(map(str, error.absolute_path)) or "top level"
        hint = ""
        if error.validator == "type" and isinstance(error.instance, str):
            hint = " (YAML reads 1e-5 as text: write 1.0e-5)"
        fail(f"config: {key}: {error.message}{hint}")


def entry(section, name, used_by):
    """config[section][name], or a line that says which names there are."""
    if name not in config[section]:
        known = ", ".join(sorted(config[section])) or "none"
        fail(f"config: {used_by} names {name!r}, which is not under {section} (there: {known})")
    return config[section][name]


def recipe(stage, name):
    """The settings of a recipe: the stage's defaults, then what the recipe states itself."""
    recipes = config[stage]["recipes"]
    if name not in recipes:
        fail(f"config: {stage}.recipes has no {name!r} (there: {', '.join(recipes)})")
    return {**config[stage]["defaults"], **recipes[name]}


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
        return canonical_json(recipe(stage, wildcards.name)["placement"])

    return lookup


def check_references():
    """Stop if a recipe names a model, dataset or recipe that the config does not have."""
    for name, model in config["models"].items():
        if "train_on" in model.get("tokenizer", {}):
            entry("datasets", model["tokenizer"]["train_on"], f"models.{name}.tokenizer")
    for stage in ("sft", "reward", "rlhf"):
        for name in config[stage]["recipes"]:
            settings = recipe(stage, name)
            for dataset in settings["datasets"]:
                entry("datasets", dataset, f"{stage}.recipes.{name}.datasets")
            if stage == "rlhf":
                recipe("sft", settings["actor"])
                recipe("reward", settings["reward"])
            else:
                base_model(stage, name)


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


# --- specs ----------------------------------------------------------------------------------

DESCRIPTIONS = {}


def job(rule, folder):
    """Register a function of a name that describes the rule's job: settings, inputs, files."""

    def register(describe):
        DESCRIPTIONS[rule] = (folder, describe)
        return describe

    return register


def folder_of(rule, name):
    return f"output/{DESCRIPTIONS[rule][0]}/{name}"


def manifest_of(rule, name):
    return f"{folder_of(rule, name)}.manifest.json"


@cache
def code_of(rule):
    return code_digests(ROOT / f"scripts/{rule}.py")


@cache
def requirements():
    return requirements_digest(ROOT / "requirements.txt")


@cache
def digest_cache():
    return DigestCache("output/specs/digests.json")


@cache
def spec_of(rule, name):
    """The spec of a job and its digest."""
    described = DESCRIPTIONS[rule][1](name)
    inputs = {
        key: {
            "rule": upstream,
            "name": upstream_name,
            "path": folder_of(upstream, upstream_name),
            "spec": spec_of(upstream, upstream_name)[1],
        }
        for key, (upstream, upstream_name) in described.get("inputs", {}).items()
    }
    spec = {
        "rule": rule,
        "name": name,
        "path": folder_of(rule, name),
        "settings": described["settings"],
        "inputs": inputs,
        "files": described.get("files", {}),
        "code": code_of(rule),
        "requirements": requirements(),
    }
    return spec, digest(spec)


def is_fresh(rule, name):
    """Whether the result on disk was made from today's spec and inputs, and is all there."""
    spec, spec_digest = spec_of(rule, name)
    try:
        manifest = json.loads(Path(manifest_of(rule, name)).read_text())
        made_from, inputs, files = (manifest[key] for key in ("spec", "inputs", "files"))
    except (FileNotFoundError, ValueError, KeyError):
        return False
    folder = Path(folder_of(rule, name))
    return (
        digest(made_from) == spec_digest
        and all(
            (folder / file).is_file() and (folder / file).stat().st_size == facts["size"]
            for file, facts in files.items()
        )
        and all(
            not Path(path).exists() or file_digest(path) == inputs.get(key)
            for key, job in spec["inputs"].items()
            for path in [f"{job['path']}.manifest.json"]
        )
    )


@cache
def spec_file(rule, name):
    """Path of the job's spec, written if it is new, with times set for Snakemake to see.

    A stale result is older than its spec. A fresh one is as new as its spec and its inputs at
    least, whatever has been touched, copied or replaced since.
    """
    spec, spec_digest = spec_of(rule, name)
    path = Path(f"output/specs/{rule}/{name}-{spec_digest[:16]}.json")
    if not path.exists():
        write_atomically(path, json.dumps(spec, indent=1, sort_keys=True) + "\n")
    for job in spec["inputs"].values():
        spec_file(job["rule"], job["name"])
    if not is_fresh(rule, name):
        os.utime(path)
        return str(path)
    manifest = Path(manifest_of(rule, name))
    before = [path, *(Path(f"{job['path']}.manifest.json") for job in spec["inputs"].values())]
    newest = max(file.stat().st_mtime_ns for file in before if file.exists())
    if manifest.stat().st_mtime_ns < newest:
        os.utime(path, ns=(0, 0))
        os.utime(manifest, ns=(newest, newest))
    return str(path)


def inputs(rule):
    """Input function of a rule: its spec, and the manifests of the jobs before it."""

    def lookup(wildcards):
        spec, _ = spec_of(rule, wildcards.name)
        manifests = {
            key: manifest_of(job["rule"], job["name"])
            for key, job in spec["inputs"].items()
        }
        return {"spec": spec_file(rule, wildcards.name), **manifests}

    return lookup


def science(settings):
    """Settings without their placement, with the seed: what a training program needs to know."""
    return {"seed": config["seed"]} | {k: v for k, v in settings.items() if k != "placement"}


def built_targets():
    """Recipes that have a result under output/, or the tiny one."""
    built = [
        f"output/{stage}/{name}"
        for stage in ("sft", "reward", "rlhf")
        for name in config[stage]["recipes"]
        if Path(f"output/{stage}/{name}.manifest.json").exists()
    ]
    return built or ["output/rlhf/tiny"]


check_config()
check_references()
