"""The table of rules, apart from what Snakemake schedules, and where and how jobs run.

To add a rule, write

1. a function that describes its jobs: their settings, inputs, external files and options. It is in
   data_jobs.py or model_jobs.py and has the name of the rule;
2. its row in RULES;
3. its program, scripts/RULE.py, or the name of another one in the row;
4. the rule itself in rules/*.smk: `use rule job as RULE with` its inputs, its output
   `output/FOLDER/{name}.manifest.json` and its log; `resources: **OF_PLACEMENT` if it runs a model.

Specs, staleness, placements, targets, estimates and cards are derived from the table. Programs that
treat some rules in a special way, such as find_row.py and verify.py, name them.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from snakechat.config.recipes import COMPARISON_NAME, PHASES, RECIPE_NAME, STAGES, Config
from snakechat.jobs import data_jobs, model_jobs
from snakechat.jobs.data_jobs import Description
from snakechat.jobs.model_jobs import PAGES
from snakechat.workflow.processes import SERIAL, Placement

Loss = Literal["sft", "policy", "score"]
NAME, STAGE = RECIPE_NAME.pattern, f"({'|'.join(STAGES)})"


class Rule(NamedTuple):
    """A rule whose jobs have specs.

    Attributes:
        describe: Describes a job, given the config and the parts of its name.
        folder: Folder of the results below output/.
        names: A regular expression for the names of jobs: NAME, or STAGE/NAME and the like.
        program: Name of the program in scripts/; None if it is the name of the rule.
        shows_provenance: Whether the program shows what its inputs were made from, so that their
            whole manifests count, and not only their content.
        stage: Stage of the recipe whose placement the jobs have; None where it is the first
            wildcard. Jobs that belong to no recipe have no placement.
        work: What the program does with models. It trains, or samples at scale, with all processes
            of its placement; an evaluation has one, unless ZeRO 3 partitions the models. None if it
            runs no model.
        loss: What the forward pass of a model that it trains or evaluates computes
            (snakechat.estimates.memory).
        model: What the model card says that the model is; None if the rule trains none.
    """

    describe: Callable[..., Description]
    folder: str
    names: str = NAME
    program: str | None = None
    shows_provenance: bool = False
    stage: str | None = None
    work: Literal["training", "sampling", "evaluation"] | None = None
    loss: Loss = "policy"
    model: str | None = None


# What a forward pass of a stage's training computes, and what the model card says of its model.
TRAINED: dict[str, tuple[Loss, str]] = {
    "sft": ("sft", "a chat model, fine-tuned on chosen responses"),
    "reward": ("score", "a reward model, trained on pairs of responses"),
    "dpo": ("policy", "a chat model, trained on pairs of responses with DPO"),
    "rlhf": ("policy", "a chat model, trained with RLHF on scores of its own responses"),
}


RULES: dict[str, Rule] = {
    # Data and models.
    "import_dataset": Rule(data_jobs.import_dataset, "data"),
    "label_pairs": Rule(data_jobs.label_pairs, "data"),
    "split_dataset": Rule(data_jobs.split_dataset, "split"),
    "fetch_model": Rule(data_jobs.fetch_model, "models"),
    "init_model": Rule(data_jobs.init_model, "models"),
    # For commands of users.
    "render_rows": Rule(model_jobs.render_rows, "rows", f"{STAGE}/{NAME}"),
    # Stages.
    **{
        f"tokenize_{stage}": Rule(
            partial(model_jobs.tokenize, stage=stage),
            f"tokens/{stage}",
            program="tokenize_phase",
            stage=stage,
        )
        for stage in PHASES
    },
    "compute_reference": Rule(
        model_jobs.compute_reference, "reference", stage="dpo", work="evaluation"
    ),
    **{
        f"train_{stage}": Rule(
            partial(model_jobs.train, stage=stage),
            stage,
            stage=stage,
            work="training",
            loss=loss,
            model=model,
        )
        for stage, (loss, model) in TRAINED.items()
    },
    **{
        f"evaluate_{stage}": Rule(
            partial(model_jobs.evaluate, stage=stage),
            f"eval/{stage}",
            stage=stage,
            work="evaluation",
            loss="score" if loss == "score" else "policy",
        )
        for stage, (loss, _) in TRAINED.items()
    },
    # Responses to train on.
    "generate_responses": Rule(
        model_jobs.generate_responses, "generations", stage="generations", work="sampling"
    ),
    "score_responses": Rule(
        model_jobs.score_responses, "scores", stage="generations", work="evaluation", loss="score"
    ),
    "select_responses": Rule(data_jobs.select_responses, "data"),
    # Benchmarks of models by commands of users.
    "run_benchmark": Rule(
        model_jobs.run_benchmark,
        "benchmark",
        f"{NAME}/({'|'.join(STAGES)}|models)/{NAME}",
        stage="benchmarks",
        work="sampling",
    ),
    # Gates and pages.
    "check_gate": Rule(model_jobs.check_gate, "gate", f"{STAGE}/{NAME}"),
    "prompt_eval": Rule(
        model_jobs.prompt_eval, "prompt_eval", f"(sft|dpo|rlhf)/{NAME}", work="evaluation"
    ),
    "rw_eval": Rule(
        lambda config, name: model_jobs.prompt_eval(config, "reward", name),
        "rw_eval/reward",
        stage="reward",
        work="evaluation",
    ),
    "draw_report": Rule(
        model_jobs.draw_report, "report", f"{STAGE}/{NAME}", "draw_page", shows_provenance=True
    ),
    "draw_page": Rule(
        model_jobs.draw_page,
        "pages",
        f"({'|'.join(PAGES)})/{STAGE}/{COMPARISON_NAME.pattern}",
        shows_provenance=True,
    ),
}


# --- resources ----------------------------------------------------------------------------------

# The keys of `slurm` in a deployment. Without one, the profile decides.
OF_SLURM = {
    "slurm_partition": "partition",
    "slurm_account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "gpu_model": "gpu_type",
}


def used_resources(config: Config) -> list[str]:
    """Return the resources that jobs may have.

    Those of Slurm that no deployment sets are omitted: Snakemake evaluates their defaults, which
    may be expressions.
    """
    placements = (config.recipe(*recipe)["placement"] for recipe in config.places)
    keys = {key for placement in placements for key in placement.get("slurm") or {}}
    names = job_resources(SERIAL)
    return [name for name in names if name not in OF_SLURM or OF_SLURM[name] in keys]


def job_resources(placement: Placement, out_of_memory: int = 0) -> dict[str, int | str | None]:
    """Return the resources of a job by name; None where the job does not ask for one.

    The names follow Snakemake's plugin for Slurm. gpu counts the GPUs of a whole job.

    out_of_memory: How often the job ran out of memory in this build. Its memory grows by half each
        time, up to `max_mem_mb`. A training that is resumed asks for the same time again.
    """
    nodes, gpus, slurm = placement.nodes, placement.gpus_per_node, placement.slurm or {}
    many, gpu_type = nodes > 1, slurm.get("gpu_type")
    limit = placement.max_mem_mb or placement.mem_mb
    return {
        **{name: slurm.get(key) for name, key in OF_SLURM.items()},
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
