"""Resources of jobs, from their placements. A placement is never part of a spec."""

from typing import Any, Literal

from snakechat.config.recipes import Config

# What a job does with models: it trains or samples at scale with all processes of its placement, or
# it evaluates.
Work = Literal["training", "evaluation"]

# In the names of Snakemake's plugin for Slurm; gpu counts the GPUs of a whole job.
RESOURCES = ("nodes", "gpu", "gres", "mpi", "tasks", "tasks_per_gpu", "mem_mb", "runtime")


def job_placement(config: Config, stage: str, name: str, work: Work) -> dict[str, Any]:
    """Return the placement of a job of a recipe.

    An evaluation has one process, on at most one GPU, unless ZeRO 3 partitions the models: they may
    not fit on one GPU. Then it has all processes.

    Args:
        config: The checked config.
        stage: sft, reward, dpo, rlhf or generations.
        name: Name of the recipe.
        work: What the job does.
    """
    placement = config.recipe(stage, name)["placement"]
    if work == "training" or placement["zero_stage"] == 3:
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
