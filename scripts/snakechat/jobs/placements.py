"""Where and how jobs run: the placement and the options of their program, Snakemake's resources.

No result depends on them: they are never part of a spec.
"""

from collections.abc import Sequence
from dataclasses import replace

from snakechat.config.recipes import Config
from snakechat.config.sections import judge_access
from snakechat.jobs.descriptions import Description
from snakechat.jobs.rules import RULES, recipe_of
from snakechat.workflow.placement import SERIAL, Placement, RunOptions

# In the names of Snakemake's plugin for Slurm; gpu counts the GPUs of a whole job.
HARDWARE = ("nodes", "gpu", "gres", "mpi", "tasks", "tasks_per_gpu", "mem_mb", "runtime")
# The keys of `slurm` in a deployment. Without one, the profile decides.
OF_SLURM = {
    "slurm_partition": "partition",
    "slurm_account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "gpu_model": "gpu_type",
}


def used_resources(config: Config) -> list[str]:
    """Return the resources that jobs may have: those of Slurm only where a placement sets them.

    Snakemake evaluates each of them for each job.
    """
    placements = (config.recipe(*recipe)["placement"] for recipe in config.places)
    keys = {key for placement in placements for key in placement.get("slurm") or {}}
    return [*HARDWARE, *(name for name, key in OF_SLURM.items() if key in keys)]


def job_placement(config: Config, rule: str, name: str) -> Placement:
    """Return the placement of a job: nodes, GPUs, threads, memory and time.

    An evaluation has one process, on at most one GPU, unless ZeRO 3 partitions the models: they may
    not fit on one GPU. Then it has all processes. A job that runs no model has one process too; one
    that tokenizes has the threads of its recipe.
    """
    is_tokenization = RULES[rule].program == "tokenize_phase"
    if RULES[rule].work is None and not is_tokenization:
        return SERIAL
    placement = Placement(**config.recipe(*recipe_of(rule, name))["placement"])
    if is_tokenization:
        return replace(SERIAL, threads=placement.threads)
    # A training chooses its own, for the memory of its GPUs.
    if placement.micro_batch_tokens == "auto" and RULES[rule].work != "training":
        placement = replace(placement, micro_batch_tokens=SERIAL.micro_batch_tokens)
    if RULES[rule].work != "evaluation" or placement.zero_stage == 3:
        return placement
    gpus = placement.gpus_per_node
    threads = max(placement.threads // max(gpus, 1), 1)
    return replace(placement, nodes=1, gpus_per_node=min(gpus, 1), threads=threads)


def job_resources(placement: Placement, out_of_memory: int = 0) -> dict[str, int | str | None]:
    """Return the resources of a job by name; None where the job does not ask for one.

    Args:
        placement: The placement of the job.
        out_of_memory: How often the job ran out of memory in this build. Its memory grows by half
            each time, up to `max_mem_mb`. A training that is resumed asks for the same time again.
    """
    nodes, gpus, slurm = placement.nodes, placement.gpus_per_node, placement.slurm or {}
    many, gpu_type = nodes > 1, slurm.get("gpu_type")
    limit = placement.max_mem_mb or placement.mem_mb
    of_slurm: dict[str, int | str | None] = {name: slurm.get(key) for name, key in OF_SLURM.items()}
    return {
        **of_slurm,
        "nodes": nodes,
        "gpu": None if many else gpus or None,
        # On several nodes: neither fewer GPUs on one of them, nor the GPUs of one spread over two.
        "gres": ":".join(filter(None, ("gpu", gpu_type, str(gpus)))) if many and gpus else None,
        "gpu_model": gpu_type if gpus and not many else None,
        # The plugin then leaves it to scripts/launch.py to start a task on each node.
        "mpi": "srun" if many else None,
        "tasks": nodes if many else None,
        "tasks_per_gpu": 0 if many else None,
        "mem_mb": min(placement.mem_mb * (2 + out_of_memory) // 2, limit),
        "runtime": placement.runtime,
    }


def run_options(
    config: Config, rule: str, description: Description, snakemake: Sequence[str]
) -> RunOptions:
    """Return the options that the program of a job gets.

    Args:
        config: The checked config.
        rule: The rule of the job.
        description: What the job is made from.
        snakemake: The options of Snakemake with which the result is rebuilt.
    """
    own = dict(description.options)
    if RULES[rule].work is not None:
        own["save_steps"] = config.values["save_steps"]
    if judges := description.settings.get("llm_judges"):
        own["llm_judges"] = judge_access(config.values["llm_judges"], judges)
    return RunOptions(
        stores=list(map(str, config.stores)),
        hermetic=config.values["hermetic"],
        snakemake=list(snakemake),
        **own,
    )
