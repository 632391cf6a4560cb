"""The rules whose jobs have specs.

The rules themselves (rules/*.smk) have what Snakemake schedules.
"""

from collections.abc import Callable
from inspect import signature
from typing import Literal, NamedTuple

from snakechat.config.recipes import Config
from snakechat.jobs import data_jobs, model_jobs, page_jobs
from snakechat.jobs.descriptions import Description

Work = Literal["training", "evaluation"]


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
        work: What the program does with models: it trains or samples at scale with all processes
            of its placement, or it evaluates. None if it runs no model.
    """

    describe: Callable[..., Description]
    folder: str
    program: str | None = None
    shows_provenance: bool = False
    stage: str | None = None
    work: Work | None = None


def _tokenization(stage: str) -> Rule:
    """Return the rule that tokenizes the phase of a stage."""

    def describe(config: Config, name: str) -> Description:
        return model_jobs.tokenize(config, stage, name)

    return Rule(describe, f"tokens/{stage}", program="tokenize_phase", stage=stage)


# In the order in which a build runs them.
RULES: dict[str, Rule] = {
    # Data and models.
    "import_dataset": Rule(data_jobs.import_dataset, "data"),
    "label_pairs": Rule(data_jobs.label_pairs, "data"),
    "split_dataset": Rule(data_jobs.split_dataset, "split"),
    "fetch_model": Rule(data_jobs.fetch_model, "models"),
    "init_model": Rule(data_jobs.init_model, "models"),
    # SFT.
    "tokenize_sft": _tokenization("sft"),
    "train_sft": Rule(model_jobs.train_sft, "sft", stage="sft", work="training"),
    "evaluate_sft": Rule(model_jobs.evaluate_sft, "eval/sft", stage="sft", work="evaluation"),
    # Reward model.
    "tokenize_reward": _tokenization("reward"),
    "train_reward": Rule(model_jobs.train_reward, "reward", stage="reward", work="training"),
    "evaluate_reward": Rule(
        model_jobs.evaluate_reward, "eval/reward", stage="reward", work="evaluation"
    ),
    # DPO.
    "tokenize_dpo": _tokenization("dpo"),
    "compute_reference": Rule(
        model_jobs.compute_reference, "reference", stage="dpo", work="evaluation"
    ),
    "train_dpo": Rule(model_jobs.train_dpo, "dpo", stage="dpo", work="training"),
    "evaluate_dpo": Rule(model_jobs.evaluate_dpo, "eval/dpo", stage="dpo", work="evaluation"),
    # RL.
    "tokenize_rlhf": _tokenization("rlhf"),
    "train_rlhf": Rule(model_jobs.train_rlhf, "rlhf", stage="rlhf", work="training"),
    "evaluate_rlhf": Rule(model_jobs.evaluate_rlhf, "eval/rlhf", stage="rlhf", work="evaluation"),
    # Responses to train on.
    "tokenize_generations": _tokenization("generations"),
    "generate_responses": Rule(
        model_jobs.generate_responses, "generations", stage="generations", work="training"
    ),
    "score_responses": Rule(
        model_jobs.score_responses, "scores", stage="generations", work="evaluation"
    ),
    "select_responses": Rule(data_jobs.select_responses, "data"),
    # Gates and pages.
    "check_gate": Rule(model_jobs.check_gate, "gate"),
    "prompt_eval": Rule(page_jobs.prompt_eval, "prompt_eval", work="evaluation"),
    "rw_eval": Rule(page_jobs.rw_eval, "rw_eval/reward", stage="reward", work="evaluation"),
    "draw_report": Rule(page_jobs.draw_report, "report", "draw_page", shows_provenance=True),
    "draw_page": Rule(page_jobs.draw_page, "pages", shows_provenance=True),
}


def num_wildcards(rule: str) -> int:
    """Return the number of wildcards of a rule: 1 for NAME, 2 for STAGE/NAME."""
    return len(signature(RULES[rule].describe).parameters) - 1


def recipe_of(rule: str, name: str) -> tuple[str, str]:
    """Return the stage and the name of the recipe that a job belongs to."""
    stage = RULES[rule].stage
    if stage is not None:
        return stage, name
    first, _, recipe = name.partition("/")
    return first, recipe
