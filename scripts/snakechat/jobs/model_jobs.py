"""Describes the jobs that tokenize data, train and run models, and draw pages.

A function has the name of the rule whose jobs it describes. `tokenize`, `train` and `evaluate` are
for the rules of several stages.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snakechat.config.recipes import PHASES, STAGES, Config, ConfigError, Reference, available
from snakechat.config.settings import PreferenceSettings, has_reference, has_reference_point
from snakechat.jobs.data_jobs import Description, Inputs, errors_at, present
from snakechat.workflow.commands import named_files, names_in, pins_in, read_interpreter
from snakechat.workflow.links import find_version
from snakechat.workflow.manifest import MANIFEST

# The arrays of tokens of a phase.
FIELDS = {
    "sft": ["prompt", "chosen"],
    "reward": ["prompt", "chosen", "rejected"],
    "rlhf": ["prompt"],
}
# Pages below output/ that users ask for, each drawn from a result of its own: PAGE/STAGE/NAME.html.
PAGES = ("compare", "prompt_eval", "rw_eval")
# What names the models and the recipes that a training reads.
TRAINED_FROM = ("model", "actor", "reward", "teacher", "ptx")


def tokenize(config: Config, name: str, stage: str) -> Description:
    recipe = config.recipe(stage, name)
    names, weights = zip(*recipe["datasets"], strict=True)
    inputs = {"tokenizer": config.tokenizer_model(stage, name)}
    for number, dataset in enumerate(names, start=1):
        inputs[f"records.{number}"] = config.records_job(dataset)
        inputs[f"rows.{number}"] = ("split_dataset", dataset)
    defaults = {"on_bad_row": config.values["on_bad_row"]}
    entries = [defaults | config.values["datasets"][dataset] for dataset in names]
    skipping = [
        number
        for number, entry in enumerate(entries, start=1)
        # The toy has no bad rows.
        if entry["on_bad_row"] == "skip" and "generate" not in entry
    ]
    return Description(
        settings={
            "phase": PHASES[stage],
            "fields": FIELDS[PHASES[stage]],
            # It draws the rows that a weight with a fraction repeats.
            "seed": recipe["seed"] if any(weight % 1 for weight in weights) else None,
            # Of each dataset, in the order of the inputs.
            "weights": list(weights),
            "template": config.template(stage, name),
            "unpaired": stage == "dpo" and has_reference_point(recipe["loss"]),
            # Numbers of datasets whose rows may be rejected by the chat template.
            **({"skip_rejected": skipping} if skipping else {}),
            **present(recipe, "max_length", "max_prompt_length", "train_on"),
        },
        inputs=inputs,
    )


def render_rows(config: Config, stage: str, name: str) -> Description:
    """Describe the rows that commands read: the same as the tokens, whatever their length."""
    rows = tokenize(config, name, stage)
    lengths = ("max_length", "max_prompt_length")
    settings = {key: value for key, value in rows.settings.items() if key not in lengths}
    return rows._replace(settings=settings)


def _started(config: Config, stage: str, name: str) -> Inputs:
    """Return the model that a recipe starts from, and its tokens."""
    key = "actor" if stage == "rlhf" else "model"
    return {
        key: config.model_job(config.origin(stage, name)),
        "tokens": (f"tokenize_{stage}", name),
    }


# --- trainings ----------------------------------------------------------------------------------


def train(config: Config, name: str, stage: str) -> Description:
    """Describe a training by our program, or by a command.

    A command reads the initial model, and what it names in braces.
    """
    recipe, place = config.recipe(stage, name), f"{stage}.recipes.{name}"
    inputs = _started(config, stage, name)
    if stage == "rlhf":
        for teacher in config.references(stage, name)["teacher"].values():
            inputs["teacher"] = config.model_job(teacher)
        if recipe["ptx"] is not None:
            inputs["ptx"] = ("tokenize_sft", recipe["ptx"])
        inputs |= _reward_models(config, stage, name, "reward")
    if stage == "dpo" and has_reference(recipe["loss"]):
        inputs["reference"] = ("compute_reference", name)
    if "command" not in recipe:
        return Description(config.program_settings(stage, name), inputs)
    words = names_in(recipe["command"])
    # {reference} is the model itself.
    read = {"model", "actor", *words - {"reference"}}
    found = {key: job for key, job in inputs.items() if key.partition(".")[0] in read}
    rewards = sum(key.startswith("reward") for key in found)
    if "reward" in words and rewards != 1:
        raise ConfigError(f"config: {place}: {{reward}} is one model, and reward has {rewards}")
    if "data" in words:
        found["data"] = ("render_rows", f"{stage}/{name}")
    return _command(config, recipe, place, found)


def run_benchmark(config: Config, benchmark: str, section: str, name: str) -> Description:
    keys, model = config.recipe("benchmarks", benchmark), config.model_job(Reference(section, name))
    return _command(config, keys, f"benchmarks.{benchmark}", {"model": model})


def _command(config: Config, keys: Mapping[str, Any], place: str, inputs: Inputs) -> Description:
    """Return the description of a job that runs a command.

    The text of the command counts, the content of the files that it names, and the versions of its
    interpreter, if it has one, and of the lock or, without one, of the installed distributions.

    keys, place: The keys of a recipe or a benchmark, and their place in the config.

    Raises ConfigError if a file or the interpreter does not exist.
    """
    root, lock = config.local_path(""), keys.get("lock")
    names = ("command", "lock", "network", "metrics")
    settings = {name: keys[name] for name in names if keys.get(name)}
    if "seed" in names_in(keys["command"]):
        settings["seed"] = keys["seed"]
    python = str(config.local_path(keys["python"])) if "python" in keys else ""
    with errors_at(place):
        named = [*keys.get("files", ()), *([lock] if lock else [])]
        paths = {file: Path(root, file) for file in named_files(root, named)}
        if python or "python" in names_in(keys["command"]):
            found, _ = read_interpreter(python or sys.executable)
            settings["distributions"] = (
                {**pins_in(Path(root, lock)), "python": found["python"]} if lock else found
            )
    return Description(settings, inputs, paths, {"source": str(root), "python": python})


# --- evaluations --------------------------------------------------------------------------------


def evaluate(config: Config, name: str, stage: str) -> Description:
    """Describe an evaluation on held-out rows, or of an RLHF model, by its responses."""
    if stage == "rlhf":
        return evaluate_rlhf(config, name)
    settings = config.used_settings(stage, name)
    datasets = [dataset for dataset, _ in settings["datasets"]]
    # Metrics name several datasets.
    found = {"datasets": datasets if len(datasets) > 1 else []}
    inputs = {"model": (f"train_{stage}", name), "tokens": (f"tokenize_{stage}", name)}
    if stage == "sft":
        found["dtype"] = settings["dtype"]
    if stage == "dpo":
        found |= PreferenceSettings(
            **present(settings, *PreferenceSettings.model_fields)
        ).model_dump()
        if has_reference_point(settings["loss"]):
            # Of the responses to other prompts.
            found["max_length"] = settings["max_length"]
    if stage == "sft" or (stage == "dpo" and has_reference(settings["loss"])):
        inputs["base"] = config.model_job(config.origin(stage, name))
    return Description(found, inputs)


def compute_reference(config: Config, name: str) -> Description:
    recipe = config.recipe("dpo", name)
    batches = present(recipe, "global_batch_size", "epochs", "seed", "max_steps")
    return Description(
        settings={
            "dtype": recipe["dtype"],
            # Of the responses to other prompts.
            "mismatched_max_length": (
                recipe["max_length"] if has_reference_point(recipe["loss"]) else None
            ),
            # In fp32, they change the log-probability of a response by less than 1e-4 nats.
            "batches": None if recipe["dtype"] == "fp32" else batches,
        },
        inputs=_started(config, "dpo", name),
    )


def evaluate_rlhf(config: Config, name: str) -> Description:
    recipe = config.recipe("rlhf", name)
    datasets = [dataset for dataset, _ in recipe["datasets"]]
    generators = {config.values["datasets"][dataset].get("generate") for dataset in datasets}
    trained_on = phases_of_datasets(config, name)
    evaluation = {**config.values["evaluation"], **recipe.get("evaluation", {})}
    if not evaluation["llm_judge"]:
        # No number of its prompts.
        del evaluation["llm_judge_prompts"]
    return Description(
        settings={
            **present(recipe, "seed", "dtype", "max_response_length", "reward_functions"),
            **config.reward_settings("rlhf", name, "reward", "judge"),
            # Its metrics name the datasets.
            "datasets": datasets,
            "trained_on": trained_on,
            # The generator of all datasets, which defines correct responses.
            "exact_check": generators.pop() if len(generators) == 1 else None,
            **evaluation,
        },
        inputs={
            **{f"records.{dataset}": config.records_job(dataset) for dataset in trained_on},
            **{f"rows.{dataset}": ("split_dataset", dataset) for dataset in trained_on},
            **models_of(config, "rlhf", name),
            **_reward_models(config, "rlhf", name, "reward"),
            **_reward_models(config, "rlhf", name, "judge"),
            "tokens": ("tokenize_rlhf", name),
        },
    )


def phases_of_datasets(config: Config, name: str) -> dict[str, list[str]]:
    """Return the phases of each dataset that the models of an rlhf recipe were trained on."""
    phases: dict[str, set[str]] = {}
    trained = [Reference("rlhf", name)]
    for recipe in trained:
        for dataset, _ in config.recipe(*recipe)["datasets"]:
            phases.setdefault(dataset, set()).add(PHASES[recipe.section])
        named = config.references(*recipe)
        models = [model for key in TRAINED_FROM for model in named.get(key, {}).values()]
        trained += [model for model in models if model.section in STAGES]
    return {dataset: sorted(phases[dataset]) for dataset in sorted(phases)}


def models_of(config: Config, stage: str, name: str) -> Inputs:
    """Return the jobs of a recipe's model and of the models it is compared with, by label."""
    origin, named = config.origin(stage, name), config.references(stage, name)
    is_base = origin.section == "models"
    compared = named.get("compare_with", {}).items()
    return {
        **({"base": config.model_job(origin)} if is_base else models_of(config, *origin)),
        **{f"compare_with.{text}": config.model_job(model) for text, model in compared},
        stage: (f"train_{stage}", name),
    }


def benchmarks_of(config: Config, stage: str, name: str, models: Inputs | None = None) -> Inputs:
    """Return the jobs of a recipe's benchmarks of models, by benchmark.LABEL/BENCHMARK.

    models: By label. Default: the model of the recipe, whose label is STAGE/NAME.
    """
    models = models or {f"{stage}/{name}": (f"train_{stage}", name)}
    sections = {f"train_{each}": each for each in STAGES}
    return {
        f"benchmark.{label}/{each}": ("run_benchmark", f"{each}/{section}/{model}")
        for label, (rule, model) in models.items()
        for section in [sections.get(rule, "models")]
        for each in config.recipe(stage, name)["benchmarks"]
    }


def _reward_models(config: Config, stage: str, name: str, key: str) -> Inputs:
    """Return the jobs that make the models of `reward` or `judge` (key) of a recipe."""
    models = config.reward_models(name, key, stage)
    return {input_name: config.model_job(model) for input_name, model in models.items()}


# --- responses to train on --------------------------------------------------------------------


def generate_responses(config: Config, name: str) -> Description:
    # No score changes the responses.
    return Description(
        settings={
            **config.program_settings("generations", name),
            "reward": None,
            "reward_functions": {},
            "reward_templates": {},
            "llm_judges": {},
        },
        inputs=_started(config, "generations", name),
    )


def score_responses(config: Config, name: str) -> Description:
    return Description(
        settings=config.program_settings("generations", name),
        inputs={
            **_started(config, "generations", name),
            "responses": ("generate_responses", name),
            **_reward_models(config, "generations", name, "reward"),
        },
    )


# --- gates and pages ---------------------------------------------------------------------------


def check_gate(config: Config, stage: str, name: str) -> Description:
    place, gate = f"config: {stage}.recipes.{name}", config.recipe(stage, name)["gate"]
    if gate is None:
        raise ConfigError(f"{place} has no gate: set one")
    metric = gate["metric"].removesuffix(".lower_bound").removesuffix(".upper_bound")
    inputs: Inputs = {"evaluation": (f"evaluate_{stage}", name)}
    measured = {
        f"benchmarks.{benchmark}.{figure}": {key: job}
        for key, job in benchmarks_of(config, stage, name).items()
        for benchmark in [key.rpartition("/")[2]]
        for figure in config.values["benchmarks"][benchmark]["metrics"]
    }
    if metric.startswith("benchmarks.") and metric not in measured:
        raise ConfigError(f"{place}.gate: metric: no {metric} {available(metric, measured)}")
    return Description({"gate": gate}, inputs | measured.get(metric, {}))


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
    return Description(
        settings=_page_settings(config, "report", stage, name),
        inputs={
            **{
                f"records.{dataset}": config.records_job(dataset)
                for recipe in recipes.items()
                for dataset, _ in config.recipe(*recipe)["datasets"]
            },
            **{f"tokens.{stage}": (f"tokenize_{stage}", name) for stage, name in recipes.items()},
            **{f"train_{stage}": (f"train_{stage}", name) for stage, name in recipes.items()},
            **{f"evaluate_{stage}": (f"evaluate_{stage}", name) for stage, name in recipes.items()},
            **benchmarks_of(config, stage, name, models),
        },
    )


def prompt_eval(config: Config, stage: str, name: str) -> Description:
    """Describe responses to sets of prompts; of a reward model, the scores of pairs of responses.

    The sets are in the folder of the user, or else of the workflow.
    """
    source = config.root if (config.root / "prompts").is_dir() else config.sources
    recipe, (_, model) = config.recipe(stage, name), config.tokenizer_model(stage, name)
    names = config.values["models"][model].get("prompt_sets", config.values["prompt_sets"])
    settings = {
        "seed": recipe["seed"],
        "prompt_sets": names,
        "template": config.template(stage, name),
    }
    if stage == "reward":
        folder = "prompts/pairs"
        models = {
            "base": config.model_job(config.origin(stage, name)),
            "model": (f"train_{stage}", name),
        }
    else:
        folder, models = "prompts", models_of(config, stage, name)
        settings |= {"dtype": recipe["dtype"], **config.values["prompt_eval"]}
    files = {f"{folder}/{each}.yaml": source / folder / f"{each}.yaml" for each in names}
    return Description(settings, models, files, {"source": os.path.relpath(source)})


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
    inputs: Inputs = {}
    # The files and folders of versions and logs, which jobs do not make.
    files: dict[str, Path] = {}
    places: dict[str, dict[str, str]] = {}
    for name in recipes:
        if "@" in name:
            version = find_version(stage, name)
            # The manifests have the digests of the files that a comparison reads.
            files |= {f"{name}/{kind}/{MANIFEST}": version[kind] / MANIFEST for kind in version}
            places[name] = {kind: str(folder) for kind, folder in version.items()}
        elif name in logs:
            files[f"{name}/log"] = config.local_path(logs[name])
            places[name] = {"log": str(files[f"{name}/log"])}
        else:
            inputs[f"training.{name}"] = (f"train_{stage}", name)
            inputs[f"evaluation.{name}"] = (f"evaluate_{stage}", name)
            inputs |= benchmarks_of(config, stage, name)
    settings = {**_page_settings(config, "compare", stage, names), "recipes": recipes}
    return Description(settings, inputs, files, {"versions": places})


def _page_settings(config: Config, page: str, stage: str, name: str) -> dict[str, Any]:
    """Return the settings of all pages; the name is a part of the page."""
    return {"page": page, "stage": stage, "name": name, "language": config.values["language"]}
