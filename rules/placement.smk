# Where and how the jobs of a stage run: never part of a spec.

from types import SimpleNamespace

from snakechat.workflow.digests import canonical_json


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


def dataset_place(wildcards):
    source = source_of(wildcards.name)
    folder = source and str(source.parent if source.is_file() else source)
    return canonical_json({"source": folder})


def model_place(wildcards):
    path = config["models"][wildcards.name].get("path")
    return canonical_json({"source": path and str(local_path(path))})


def tokenizer_place(wildcards):
    path = config["models"][wildcards.name]["tokenizer"].get("path")
    return canonical_json({"source": path and str(local_path(path))})
