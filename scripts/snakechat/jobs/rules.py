"""The table of rules: all that is known of a rule, apart from what Snakemake schedules.

To add a rule, write

1. a function that describes its jobs: their settings, inputs, external files and options. It is in
   data_jobs.py, model_jobs.py or page_jobs.py and has the name of the rule;
2. its row in RULES;
3. its program, scripts/RULE.py, or the name of another one in the row;
4. the rule itself in rules/*.smk: `use rule job as RULE with` its inputs, its output
   `output/FOLDER/{name}.manifest.json` and its log; `resources: **OF_PLACEMENT` if it runs a model.

Specs, staleness, placements, targets, estimates and cards are derived from the table. Programs that
treat some rules in a special way, such as find_row.py and verify.py, name them.
"""

from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from typing import Literal, NamedTuple

from snakechat.jobs import data_jobs, model_jobs, page_jobs
from snakechat.jobs.descriptions import Description


class Rule(NamedTuple):
    """A rule whose jobs have specs.

    Attributes:
        describe: Describes a job, given the config and the wildcards of the rule: NAME, or STAGE
            and NAME.
        folder: Folder of the results below output/.
        program: Name of the program in scripts/; None if it is the name of the rule.
        shows_provenance: Whether the program shows what its inputs were made from, so that their
            whole manifests count, and not only their content.
        stage: Stage of the recipe whose placement the jobs have; None where it is the first
            wildcard. Jobs that belong to no recipe have no placement.
        work: What the program does with models. It trains, or samples at scale, with all processes
            of its placement; an evaluation has one, unless ZeRO 3 partitions the models. None if it
            runs no model.
        loss: What the forward pass of a model that it trains or evaluates computes
            (snakechat.estimates.activation_memory).
        model: What the model card says that the model is; None if the rule trains none.
    """

    describe: Callable[..., Description]
    folder: str
    program: str | None = None
    shows_provenance: bool = False
    stage: str | None = None
    work: Literal["training", "sampling", "evaluation"] | None = None
    loss: Literal["sft", "policy", "score"] = "policy"
    model: str | None = None


def _tokenization(stage: str) -> Rule:
    """Return the rule that tokenizes the phase of a stage."""
    describe = partial(model_jobs.tokenize, stage=stage)
    return Rule(describe, f"tokens/{stage}", program="tokenize_phase", stage=stage)


# In the order in which a build runs them.
RULES: dict[str, Rule] = {
    # Data and models.
    "import_dataset": Rule(data_jobs.import_dataset, "data"),
    "label_pairs": Rule(data_jobs.label_pairs, "data"),
    "split_dataset": Rule(data_jobs.split_dataset, "split"),
    "fetch_model": Rule(data_jobs.fetch_model, "models"),
    "init_model": Rule(data_jobs.init_model, "models"),
    # For commands of users.
    "render_rows": Rule(model_jobs.render_rows, "rows"),
    # SFT.
    "tokenize_sft": _tokenization("sft"),
    "train_sft": Rule(
        model_jobs.train_sft,
        "sft",
        stage="sft",
        work="training",
        loss="sft",
        model="a chat model, fine-tuned on chosen responses",
    ),
    "evaluate_sft": Rule(model_jobs.evaluate_sft, "eval/sft", stage="sft", work="evaluation"),
    # Reward model.
    "tokenize_reward": _tokenization("reward"),
    "train_reward": Rule(
        model_jobs.train_reward,
        "reward",
        stage="reward",
        work="training",
        loss="score",
        model="a reward model, trained on pairs of responses",
    ),
    "evaluate_reward": Rule(
        model_jobs.evaluate_reward, "eval/reward", stage="reward", work="evaluation", loss="score"
    ),
    # DPO.
    "tokenize_dpo": _tokenization("dpo"),
    "compute_reference": Rule(
        model_jobs.compute_reference, "reference", stage="dpo", work="evaluation"
    ),
    "train_dpo": Rule(
        model_jobs.train_dpo,
        "dpo",
        stage="dpo",
        work="training",
        model="a chat model, trained on pairs of responses with DPO",
    ),
    "evaluate_dpo": Rule(model_jobs.evaluate_dpo, "eval/dpo", stage="dpo", work="evaluation"),
    # RL.
    "tokenize_rlhf": _tokenization("rlhf"),
    "train_rlhf": Rule(
        model_jobs.train_rlhf,
        "rlhf",
        stage="rlhf",
        work="training",
        model="a chat model, trained with RLHF on scores of its own responses",
    ),
    "evaluate_rlhf": Rule(model_jobs.evaluate_rlhf, "eval/rlhf", stage="rlhf", work="evaluation"),
    # Responses to train on.
    "tokenize_generations": _tokenization("generations"),
    "generate_responses": Rule(
        model_jobs.generate_responses, "generations", stage="generations", work="sampling"
    ),
    "score_responses": Rule(
        model_jobs.score_responses, "scores", stage="generations", work="evaluation", loss="score"
    ),
    "select_responses": Rule(data_jobs.select_responses, "data"),
    # Benchmarks of models by commands of users.
    "run_benchmark": Rule(
        page_jobs.run_benchmark, "benchmark", stage="benchmarks", work="sampling"
    ),
    # Gates and pages.
    "check_gate": Rule(model_jobs.check_gate, "gate"),
    "prompt_eval": Rule(page_jobs.prompt_eval, "prompt_eval", work="evaluation"),
    "rw_eval": Rule(page_jobs.rw_eval, "rw_eval/reward", stage="reward", work="evaluation"),
    "draw_report": Rule(page_jobs.draw_report, "report", "draw_page", shows_provenance=True),
    "draw_page": Rule(page_jobs.draw_page, "pages", shows_provenance=True),
}


def num_wildcards(rule: str) -> int:
    """Return the number of wildcards of a rule: 1 for NAME, 2 for STAGE/NAME."""
    parameters = signature(RULES[rule].describe).parameters.values()
    return sum(each.kind == Parameter.POSITIONAL_OR_KEYWORD for each in parameters) - 1


def recipe_of(rule: str, name: str) -> tuple[str, str]:
    """Return the stage and the name of the recipe that a job belongs to."""
    stage = RULES[rule].stage
    first, _, recipe = name.partition("/")
    # The placement of a benchmark is its own.
    if stage == "benchmarks":
        return stage, first
    return (first, recipe) if stage is None else (stage, name)
