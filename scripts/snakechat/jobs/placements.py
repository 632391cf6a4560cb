"""Where and how jobs run: the placement that their program gets, and what Snakemake schedules.

No result depends on it: a placement is never part of a spec.
"""

from collections.abc import Sequence
from typing import Any

from snakechat.config.licenses import declared_license, declared_licenses
from snakechat.config.llm_judges import judge_access
from snakechat.config.placement import MICRO_BATCH_TOKENS
from snakechat.config.recipes import Config
from snakechat.jobs.descriptions import RULES
from snakechat.jobs.files import (
    dataset_folder,
    exclude_placement,
    model_folder,
    tokenizer_folder,
)

# In the names of Snakemake's plugin for Slurm; gpu counts the GPUs of a whole job.
RESOURCES = ("nodes", "gpu", "gres", "mpi", "tasks", "tasks_per_gpu", "mem_mb", "runtime")


def recipe_of(rule: str, name: str) -> tuple[str, str]:
    """Return the stage and the name of the recipe that a job belongs to."""
    stage = RULES[rule].stage
    if stage is not None:
        return stage, name
    first, _, recipe = name.partition("/")
    return first, recipe


def hardware(config: Config, rule: str, name: str) -> dict[str, Any]:
    """Return the placement of a recipe's job: nodes, GPUs, threads, memory and time.

    An evaluation has one process, on at most one GPU, unless ZeRO 3 partitions the models: they may
    not fit on one GPU. Then it has all processes.
    """
    placement: dict[str, Any] = config.recipe(*recipe_of(rule, name))["placement"]
    if RULES[rule].work != "evaluation" or placement["zero_stage"] == 3:
        return placement
    gpus = placement["gpus_per_node"]
    threads = max(placement["threads"] // max(gpus, 1), 1)
    return {**placement, "nodes": 1, "gpus_per_node": min(gpus, 1), "threads": threads}


def job_resources(placement: dict[str, Any], attempt: int) -> dict[str, int | str | None]:
    """Return the resources of a job by name; None where the job does not ask for one.

    Memory and time grow by half with each attempt.
    """
    nodes, gpus = placement["nodes"], placement["gpus_per_node"]
    many = nodes > 1
    return {
        "nodes": nodes,
        "gpu": None if many else gpus or None,
        # On several nodes: neither fewer GPUs on one of them, nor the GPUs of one spread over two.
        "gres": f"gpu:{gpus}" if many and gpus else None,
        # The plugin then leaves it to scripts/launch.py to start a task on each node.
        "mpi": "srun" if many else None,
        "tasks": nodes if many else None,
        "tasks_per_gpu": 0 if many else None,
        "mem_mb": placement["mem_mb"] * (1 + attempt) // 2,
        "runtime": placement["runtime"] * (1 + attempt) // 2,
    }


def program_placement(
    config: Config, rule: str, name: str, options: Sequence[str]
) -> dict[str, Any]:
    """Return the placement that the program of a job gets.

    Args:
        config: The checked config.
        rule: The rule of the job.
        name: Its name.
        options: The options of Snakemake with which the result is rebuilt.
    """
    if RULES[rule].work is not None:
        own = _models_placement(config, rule, name)
    else:
        own = _OWN.get(rule, lambda config, name: {})(config, name)
    return {
        "shared_store": config.shared_store,
        "store_max_bytes": config.store_max_bytes,
        "options": list(options),
        **own,
    }


def _models_placement(config: Config, rule: str, name: str) -> dict[str, Any]:
    """Return the placement of a program that runs models."""
    own: dict[str, Any] = {
        **hardware(config, rule, name),
        "save_steps": config.values["save_steps"],
    }
    # A training chooses its own, for the memory of its GPUs.
    if own["micro_batch_tokens"] == "auto" and not rule.startswith("train_"):
        own["micro_batch_tokens"] = MICRO_BATCH_TOKENS
    if judges := config.llm_judges(*recipe_of(rule, name)):
        own |= _access(config, judges)
    if rule in ("prompt_eval", "rw_eval"):
        # The folder of the prompt sets.
        own["source"] = str(config.local_path(""))
    return own


def _access(config: Config, judges: list[str]) -> dict[str, Any]:
    """Return where and how LLM judges are asked."""
    return {"llm_judges": judge_access(config.values["llm_judges"], judges)}


def _import_dataset(config: Config, name: str) -> dict[str, Any]:
    source = dataset_folder(config, name)
    return {
        "source": source and str(source),
        "license": declared_license(config, "datasets", name),
    }


def _fetch_model(config: Config, name: str) -> dict[str, Any]:
    source = model_folder(config, name)
    return {"source": source and str(source), "license": declared_license(config, "models", name)}


def _init_model(config: Config, name: str) -> dict[str, Any]:
    folder = tokenizer_folder(config, name)
    tokenizer = config.values["models"][name]["tokenizer"]
    excluded = {} if folder else exclude_placement(config, tokenizer["train_on"])
    return {"source": folder and str(folder), **excluded}


def _label_pairs(config: Config, name: str) -> dict[str, Any]:
    judge = config.values["datasets"][name]["llm_judge"]
    excluded = exclude_placement(config, config.labelled_dataset(name))
    return {**_access(config, [judge]), **excluded}


def _compare_runs(config: Config, name: str) -> dict[str, Any]:
    """Return the folders of the compared versions in the store."""
    versions = config.compared_versions(*name.split("/"))
    return {
        "versions": {
            recipe: {key: str(folder) for key, folder in version._asdict().items()}
            for recipe, version in versions.items()
        }
    }


_OWN = {
    "import_dataset": _import_dataset,
    "fetch_model": _fetch_model,
    "init_model": _init_model,
    "label_pairs": _label_pairs,
    "split_dataset": exclude_placement,
    "draw_report": lambda config, name: {"licenses": declared_licenses(config)},
    "compare_runs": _compare_runs,
}
