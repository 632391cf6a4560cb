"""Settings and inputs of jobs that the rule files describe (rules/*.smk)."""

from dataclasses import fields
from typing import Any

from snakechat.config.dpo import PreferenceSettings, has_reference, has_reference_point
from snakechat.config.errors import ConfigError
from snakechat.config.recipes import Config, Job, trained_section
from snakechat.config.references import Reference, input_names, ordered_references
from snakechat.data.formats import columns_of, named_columns
from snakechat.jobs.files import card_settings
from snakechat.workflow.digests import digest

Jobs = dict[str, Job]

# The default of huggingface_hub.
MAIN_BRANCH = "main"


def import_settings(config: Config, name: str) -> dict[str, Any]:
    """Return the settings of the job that imports a dataset."""
    dataset = config.entry("datasets", name, "the target")
    if "generate" in dataset:
        seed = dataset.get("seed", config.values["seed"])
        return {"seed": seed, **{key: dataset[key] for key in ("generate", "rows", "eval_rows")}}
    keys = ["format", "remove", "on_bad_row"]
    if "path" not in dataset:
        keys += ["train", "eval"]
    return {
        "on_bad_row": config.values["on_bad_row"],
        **hub_source(dataset),
        **card_settings(config, "datasets", name),
        **{key: dataset[key] for key in keys if key in dataset},
        "columns": columns_of(dataset["format"], dataset.get("columns")),
        "keep": named_columns(dataset.get("keep", {})),
    }


def hub_source(entry: dict[str, Any]) -> dict[str, str]:
    """Return the repository and the revision of a dataset or model; nothing if it has a path.

    Without a revision, it is the main branch, whose commit the job records.
    """
    if "path" in entry:
        return {}
    return {"hub": entry["hub"], "revision": entry.get("revision", MAIN_BRANCH)}


def selection_settings(config: Config, name: str) -> dict[str, Any]:
    """Return the settings of the job that selects the responses of a dataset."""
    dataset = config.values["datasets"][name]
    defaults = {"min_score": None, "min_margin": 0.0}
    return {key: dataset.get(key, defaults.get(key)) for key in ("select", *defaults)}


def selection_inputs(config: Config, name: str) -> Jobs:
    """Return the job whose scored responses a dataset is selected from."""
    recipe = config.generated_by(name)
    assert recipe is not None
    return {"scores": ("score_responses", recipe)}


def labelling_settings(config: Config, name: str) -> dict[str, Any]:
    """Return the settings of the job that labels the pairs of a dataset."""
    dataset = config.values["datasets"][name]
    return {
        "seed": config.values["seed"],
        "max_rows": dataset.get("max_rows"),
        "llm_judge": dataset["llm_judge"],
        "llm_judges": config.judge_settings([dataset["llm_judge"]]),
        **exclude_settings(config, config.labelled_dataset(name)),
    }


def labelling_inputs(config: Config, name: str) -> Jobs:
    """Return the job whose records a dataset labels."""
    return {"records": config.records_job(config.labelled_dataset(name))}


def sampling_settings(config: Config, name: str) -> dict[str, Any]:
    """Return the settings of the job that generates responses, which no score changes."""
    empty = ("reward_functions", "reward_templates", "llm_judges")
    settings = config.program_settings("generations", name)
    return {**settings, "reward": None, **{key: {} for key in empty}}


def generation_inputs(config: Config, name: str) -> Jobs:
    """Return the model and the prompts of a recipe of generations."""
    return {
        "model": config.base_model("generations", name),
        "tokens": ("tokenize_generations", name),
    }


def scoring_inputs(config: Config, name: str) -> Jobs:
    """Return the responses of a recipe of generations, its model and its reward models."""
    return {
        **generation_inputs(config, name),
        "responses": ("generate_responses", name),
        **reward_inputs(config, name, "reward", "generations"),
    }


def split_settings(config: Config, name: str) -> dict[str, Any]:
    """Return the settings of the job that splits a dataset into the phases."""
    dataset = config.values["datasets"][name]
    return {
        "seed": config.values["seed"],
        "weights": config.split_weights(name),
        "by": config.values["split"]["by"],
        # A dataset with labels has no more rows than that: each label costs two requests.
        "max_rows": None if "label" in dataset else dataset.get("max_rows"),
        **exclude_settings(config, name),
    }


def split_inputs(config: Config, name: str) -> Jobs:
    """Return the records of a dataset."""
    return {"records": config.records_job(name)}


def exclude_settings(config: Config, dataset: str) -> dict[str, Any]:
    """Return the part of a job's settings that names the excluded rows of a dataset; {} if none.

    Specs are public: they have the digest of a pattern, which may contain what is to be erased.
    """
    entries = config.values["datasets"][dataset].get("exclude")
    if entries is None:
        return {}
    patterns = [
        {"sha256": digest(entry["pattern"]), "because": entry["because"]}
        for entry in entries
        if "pattern" in entry
    ]
    rows = sorted(entry for entry in entries if isinstance(entry, str))
    return {"exclude": {"rows": rows, "patterns": patterns}}


def model_settings(config: Config, name: str) -> dict[str, Any]:
    """Return the settings of the job that fetches or initializes a base model."""
    model = config.values["models"][name]
    arguments = {key: model[key] for key in ("template_arguments",) if key in model}
    if "init" in model:
        tokenizer = {key: value for key, value in model["tokenizer"].items() if key != "path"}
        if "train_on" in tokenizer:
            tokenizer |= exclude_settings(config, tokenizer["train_on"])
        settings = {"seed": config.values["seed"], "init": model["init"], "tokenizer": tokenizer}
        return settings | arguments
    return hub_source(model) | card_settings(config, "models", name) | arguments


def tokenizer_inputs(config: Config, name: str) -> Jobs:
    """Return the records that the tokenizer of an initialized model is trained on, if any."""
    tokenizer = config.values["models"][name]["tokenizer"]
    if "train_on" not in tokenizer:
        return {}
    return {"records": config.records_job(tokenizer["train_on"])}


def tokenization_settings(config: Config, stage: str, name: str, *keys: str) -> dict[str, Any]:
    """Return the settings of the job that tokenizes a recipe's phase.

    keys: the settings of the recipe that the job needs in addition to the common ones.
    """
    recipe, datasets = config.recipe(stage, name), config.blend(stage, name)
    skipping = sorted(dataset for dataset, _ in datasets if skips_bad_rows(config, dataset))
    return {
        "seed": recipe["seed"],
        "datasets": datasets,
        "template": config.template(stage, name),
        "unpaired": stage == "dpo" and has_reference_point(recipe["loss"]),
        # Datasets whose rows may be rejected by the chat template.
        **({"skip_rejected": skipping} if skipping else {}),
        **{key: recipe[key] for key in keys},
    }


def skips_bad_rows(config: Config, name: str) -> bool:
    """Return whether bad rows of a dataset are dropped. The toy has none."""
    dataset = config.entry("datasets", name, "the target")
    if "generate" in dataset:
        return False
    policy: str = dataset.get("on_bad_row", config.values["on_bad_row"])
    return policy == "skip"


def reference_settings(config: Config, name: str) -> dict[str, Any]:
    """Return the settings of the job that computes the reference log-probabilities of DPO."""
    recipe = config.recipe("dpo", name)
    mismatched = has_reference_point(recipe["loss"])
    # In fp32, batches change the log-probability of a response by less than 1e-4 nats.
    batches = None
    if recipe["dtype"] != "fp32":
        keys = ("global_batch_size", "epochs", "seed", "max_steps")
        batches = {key: recipe[key] for key in keys}
    return {
        "dtype": recipe["dtype"],
        "mismatched_max_length": recipe["max_length"] if mismatched else None,
        "batches": batches,
    }


def reference_inputs(config: Config, name: str) -> Jobs:
    """Return the reference log-probabilities of a dpo recipe, if its loss has a reference model."""
    if not has_reference(config.recipe("dpo", name)["loss"]):
        return {}
    return {"reference": ("compute_reference", name)}


def dpo_evaluation_settings(config: Config, name: str) -> dict[str, Any]:
    """Return the settings of the evaluation of a dpo recipe."""
    recipe = config.recipe("dpo", name)
    keys = ("max_length", *(field.name for field in fields(PreferenceSettings)))
    return {
        "datasets": held_out_datasets(config, "dpo", name),
        **{key: recipe[key] for key in keys},
    }


def dpo_evaluation_inputs(config: Config, name: str) -> Jobs:
    """Return the models that the evaluation of a dpo recipe compares, and its tokens."""
    inputs = {
        "model": ("train_dpo", name),
        "tokens": ("tokenize_dpo", name),
    }
    if has_reference(config.recipe("dpo", name)["loss"]):
        inputs["base"] = config.base_model("dpo", name)
    return inputs


def held_out_datasets(config: Config, stage: str, name: str) -> list[str]:
    """Return the datasets whose held-out rows a recipe is evaluated on."""
    return [dataset for dataset, _ in config.blend(stage, name)]


def tokenization_inputs(config: Config, stage: str, name: str) -> Jobs:
    """Return the tokenizer, and records and row numbers of each dataset, of a recipe's phase."""
    jobs = {"tokenizer": config.tokenizer_model(stage, name)}
    for dataset, _ in config.blend(stage, name):
        jobs[f"records.{dataset}"] = config.records_job(dataset)
        jobs[f"rows.{dataset}"] = ("split_dataset", dataset)
    return jobs


def training_job(stage: str, name: str) -> Job:
    """Return the job that trains a recipe."""
    return f"train_{stage}", name


def models_of(config: Config, stage: str, name: str) -> Jobs:
    """Return the jobs of a recipe's model and of the models it is compared with, by label."""
    if stage == "rlhf":
        section, actor = config.actor(name)
        if section == "models":
            jobs = {"base": config.pretrained_model(actor, "the target")}
        else:
            jobs = models_of(config, section, actor)
        for model in config.recipe("rlhf", name)["compare_with"]:
            jobs[f"compare_with.{model}"] = training_job(*model.split("/"))
    else:
        rule, origin = config.base_model(stage, name)
        trained = trained_section(rule)
        jobs = models_of(config, trained, origin) if trained else {"base": (rule, origin)}
    return {**jobs, stage: training_job(stage, name)}


def rlhf_inputs(config: Config, name: str) -> Jobs:
    """Return the inputs of an RLHF training."""
    actor, ptx = config.actor(name), config.recipe("rlhf", name)["ptx"]
    jobs = {"actor": config.model_job(actor), "tokens": ("tokenize_rlhf", name)}
    teacher = config.teacher(name)
    if teacher is not None:
        jobs["teacher"] = config.model_job(teacher)
    for stage, recipe in config.recipes_behind(*actor).items():
        jobs[f"tokens.{stage}"] = (f"tokenize_{stage}", recipe)
    jobs |= reward_inputs(config, name, "reward")
    for key, (rule, recipe) in reward_inputs(config, name, "reward").items():
        if rule == "train_reward":
            jobs[f"tokens.{key}"] = ("tokenize_reward", recipe)
    if ptx is not None:
        jobs["ptx"] = ("tokenize_sft", ptx)
    return jobs


def reward_inputs(config: Config, name: str, key: str, stage: str = "rlhf") -> Jobs:
    """Return the jobs that make the models of `reward` or `judge` (key) of a recipe."""
    models = config.reward_models(name, key, stage)
    inputs = input_names(key, config.recipe(stage, name)[key])
    return {input_name: config.model_job(models[text]) for input_name, text in inputs.items()}


def rlhf_evaluation_settings(config: Config, name: str) -> dict[str, Any]:
    """Return the settings of an RLHF evaluation.

    exact_check is the generator of all the recipe's datasets, which defines correct responses.
    """
    recipe = config.recipe("rlhf", name)
    datasets = config.blend("rlhf", name)
    generators = {config.values["datasets"][dataset].get("generate") for dataset, _ in datasets}
    keys = ("seed", "dtype", "max_response_length", "reward_functions")
    templates = [config.reward_templates(recipe[key]) for key in ("reward", "judge")]
    return {
        **{key: recipe[key] for key in keys},
        **{key: ordered_references(recipe[key]) for key in ("reward", "judge")},
        "datasets": datasets,
        "trained_on": phases_of_datasets(config, name),
        "template": config.template("rlhf", name),
        "reward_templates": templates[0] | templates[1],
        "llm_judges": config.judge_settings(config.llm_judges("rlhf", name)),
        "exact_check": generators.pop() if len(generators) == 1 else None,
        **config.values["evaluation"],
    }


def phases_of_datasets(config: Config, name: str) -> dict[str, list[str]]:
    """Return the phases of each dataset that the models of an rlhf recipe were trained on."""
    trained = config.recipe_chain("rlhf", name)
    for model in config.reward_models(name, "reward").values():
        trained += config.recipe_chain(*model)
    ptx, teacher = config.recipe("rlhf", name)["ptx"], config.teacher(name)
    trained += [] if ptx is None else [Reference("sft", ptx)]
    trained += [] if teacher is None else config.recipe_chain(*teacher)
    phases: dict[str, set[str]] = {}
    if teacher is not None and teacher.section == "rlhf":
        before = phases_of_datasets(config, teacher.name)
        phases = {dataset: set(names) for dataset, names in before.items()}
    for stage, recipe in trained:
        for dataset, _ in config.blend(stage, recipe):
            phases.setdefault(dataset, set()).add("reward" if stage == "dpo" else stage)
    return {dataset: sorted(phases[dataset]) for dataset in sorted(phases)}


def rlhf_evaluation_inputs(config: Config, name: str) -> Jobs:
    """Return the inputs of an RLHF evaluation: models, reward models, prompts, training data."""
    datasets = phases_of_datasets(config, name)
    return {
        **{f"records.{dataset}": config.records_job(dataset) for dataset in datasets},
        **{f"rows.{dataset}": ("split_dataset", dataset) for dataset in datasets},
        **models_of(config, "rlhf", name),
        **reward_inputs(config, name, "reward"),
        **reward_inputs(config, name, "judge"),
        "tokens": ("tokenize_rlhf", name),
    }


def prompt_page_settings(config: Config, stage: str, name: str) -> dict[str, Any]:
    """Return the settings of a page of prompts that are common to prompt_eval and rw_eval."""
    return {
        "prompt_sets": config.prompt_sets(stage, name),
        "template": config.template(stage, name),
        "language": config.values["language"],
    }


def prompt_eval_settings(config: Config, stage: str, name: str) -> dict[str, Any]:
    """Return the settings of a page of responses to prompts."""
    recipe = config.recipe(stage, name)
    return {
        **{key: recipe[key] for key in ("seed", "dtype")},
        **prompt_page_settings(config, stage, name),
        **config.values["prompt_eval"],
    }


def gate_settings(config: Config, stage: str, name: str) -> dict[str, Any]:
    """Return the settings of the job that checks the gate of a recipe."""
    gate = config.recipe(stage, name)["gate"]
    if gate is None:
        raise ConfigError(f"config: {stage}.recipes.{name} has no gate: set one")
    return {"gate": gate}


def reported_recipes(config: Config, stage: str, name: str) -> dict[str, str]:
    """Return the recipes whose results the report of a recipe shows, by stage.

    Of several reward recipes behind an RLHF recipe, it shows the first one.
    """
    if stage != "rlhf":
        return {stage: name}
    rewards = config.reward_models(name, "reward").values()
    trained = [model.name for model in rewards if model.section == "reward"]
    recipes = config.recipes_behind(*config.actor(name))
    return recipes | {**({"reward": trained[0]} if trained else {}), "rlhf": name}


def report_inputs(config: Config, stage: str, name: str) -> Jobs:
    """Return the jobs whose results the report of a recipe shows."""
    recipes = reported_recipes(config, stage, name)
    datasets = {
        dataset for stage, name in recipes.items() for dataset, _ in config.blend(stage, name)
    }
    return {
        **{f"records.{dataset}": config.records_job(dataset) for dataset in sorted(datasets)},
        **{f"rows.{dataset}": ("split_dataset", dataset) for dataset in sorted(datasets)},
        **{f"tokens.{stage}": (f"tokenize_{stage}", name) for stage, name in recipes.items()},
        **{
            f"{verb}_{stage}": (f"{verb}_{stage}", name)
            for stage, name in recipes.items()
            for verb in ("train", "evaluate")
        },
    }
