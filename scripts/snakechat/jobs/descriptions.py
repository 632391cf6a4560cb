"""What the jobs of each rule are made from: settings, upstream jobs and external files.

A function describes the jobs of the rule that has its name. Its arguments after the config are the
wildcards of the rule: NAME, or STAGE and NAME. The rules themselves (rules/*.smk) have what
Snakemake schedules.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from snakechat.config.recipes import Config
from snakechat.jobs import files as external
from snakechat.jobs import settings as of
from snakechat.workflow.stored_versions import is_version

Work = Literal["training", "evaluation"]
# The rule and the name of a job: ("train_sft", "tiny"), ("draw_report", "sft/tiny").
Job = tuple[str, str]


class Description(NamedTuple):
    """What a job is made from, apart from its code and the pinned libraries.

    Attributes:
        settings: JSON values that the program reads.
        inputs: Upstream jobs by the keys that the program uses for them.
        files: External files by the names that the spec has for them; of a file that is not local,
            its digest.
        specs: Jobs whose whole specs are settings, by the keys of these.
    """

    settings: dict[str, Any]
    inputs: Mapping[str, Job] = {}
    files: Mapping[str, Path | str] = {}
    specs: Mapping[str, Job] = {}


class Rule(NamedTuple):
    """A rule whose jobs have specs.

    Attributes:
        describe: Describes a job, given the config and the wildcards of the rule.
        folder: Folder of the results below output/.
        program: Name of the program in scripts/.
        shows_provenance: Whether the program shows what its inputs were made from, so that their
            whole manifests count, and not only their content.
        stage: Stage of the recipe whose placement the jobs have; None where it is the first
            wildcard. Jobs that belong to no recipe have no placement.
        work: What the program does with models: it trains or samples at scale with all processes
            of its placement, or it evaluates. None if it runs no model.
    """

    describe: Callable[..., Description]
    folder: str
    program: str
    shows_provenance: bool = False
    stage: str | None = None
    work: Work | None = None


# The rules by name, in the order in which a build runs them.
RULES: dict[str, Rule] = {}


def _rule(
    folder: str, program: str | None = None, **more: Any
) -> Callable[[Callable[..., Description]], Callable[..., Description]]:
    """Return a decorator that adds a function to RULES. The program defaults to its name."""

    def add(describe: Callable[..., Description]) -> Callable[..., Description]:
        name = describe.__name__
        RULES[name] = Rule(describe, folder, program or name, **more)
        return describe

    return add


# --- data and models --------------------------------------------------------------------------


@_rule("data")
def import_dataset(config: Config, name: str) -> Description:
    return Description(
        settings=of.import_settings(config, name), files=external.dataset_files(config, name)
    )


@_rule("data")
def label_pairs(config: Config, name: str) -> Description:
    return Description(
        settings=of.labelling_settings(config, name),
        inputs=of.labelling_inputs(config, name),
        files=external.excluded_files(config, config.labelled_dataset(name)),
    )


@_rule("split")
def split_dataset(config: Config, name: str) -> Description:
    return Description(
        settings=of.split_settings(config, name),
        inputs=of.split_inputs(config, name),
        files=external.excluded_files(config, name),
    )


@_rule("models")
def fetch_model(config: Config, name: str) -> Description:
    return Description(
        settings=of.model_settings(config, name), files=external.base_model_files(config, name)
    )


@_rule("models")
def init_model(config: Config, name: str) -> Description:
    return Description(
        settings=of.model_settings(config, name),
        inputs=of.tokenizer_inputs(config, name),
        files=external.tokenizer_files(config, name),
    )


# --- SFT --------------------------------------------------------------------------------------


@_rule("tokens/sft", program="tokenize_phase", stage="sft")
def tokenize_sft(config: Config, name: str) -> Description:
    return Description(
        settings=of.tokenization_settings(config, "sft", name, "max_length"),
        inputs=of.tokenization_inputs(config, "sft", name),
    )


@_rule("sft", stage="sft", work="training")
def train_sft(config: Config, name: str) -> Description:
    return Description(
        settings=config.program_settings("sft", name),
        inputs={"model": config.base_model("sft", name), "tokens": ("tokenize_sft", name)},
    )


@_rule("eval/sft", stage="sft", work="evaluation")
def evaluate_sft(config: Config, name: str) -> Description:
    return Description(
        settings={
            "dtype": config.recipe("sft", name)["dtype"],
            "datasets": of.held_out_datasets(config, "sft", name),
        },
        inputs={
            "base": config.base_model("sft", name),
            "model": ("train_sft", name),
            "tokens": ("tokenize_sft", name),
        },
    )


# --- reward model -----------------------------------------------------------------------------


@_rule("tokens/reward", program="tokenize_phase", stage="reward")
def tokenize_reward(config: Config, name: str) -> Description:
    return Description(
        settings=of.tokenization_settings(config, "reward", name, "max_length"),
        inputs=of.tokenization_inputs(config, "reward", name),
    )


@_rule("reward", stage="reward", work="training")
def train_reward(config: Config, name: str) -> Description:
    return Description(
        settings=config.program_settings("reward", name),
        inputs={"model": config.base_model("reward", name), "tokens": ("tokenize_reward", name)},
    )


@_rule("eval/reward", stage="reward", work="evaluation")
def evaluate_reward(config: Config, name: str) -> Description:
    return Description(
        settings={"datasets": of.held_out_datasets(config, "reward", name)},
        inputs={"model": ("train_reward", name), "tokens": ("tokenize_reward", name)},
    )


# --- DPO --------------------------------------------------------------------------------------


@_rule("tokens/dpo", program="tokenize_phase", stage="dpo")
def tokenize_dpo(config: Config, name: str) -> Description:
    return Description(
        settings=of.tokenization_settings(config, "dpo", name, "max_length"),
        inputs=of.tokenization_inputs(config, "dpo", name),
    )


@_rule("reference", stage="dpo", work="evaluation")
def compute_reference(config: Config, name: str) -> Description:
    return Description(
        settings=of.reference_settings(config, name),
        inputs={"model": config.base_model("dpo", name), "tokens": ("tokenize_dpo", name)},
    )


@_rule("dpo", stage="dpo", work="training")
def train_dpo(config: Config, name: str) -> Description:
    return Description(
        settings=config.program_settings("dpo", name),
        inputs={
            "model": config.base_model("dpo", name),
            "tokens": ("tokenize_dpo", name),
            **of.reference_inputs(config, name),
        },
    )


@_rule("eval/dpo", stage="dpo", work="evaluation")
def evaluate_dpo(config: Config, name: str) -> Description:
    return Description(
        settings=of.dpo_evaluation_settings(config, name),
        inputs=of.dpo_evaluation_inputs(config, name),
    )


# --- RL ---------------------------------------------------------------------------------------


@_rule("tokens/rlhf", program="tokenize_phase", stage="rlhf")
def tokenize_rlhf(config: Config, name: str) -> Description:
    return Description(
        settings=of.tokenization_settings(config, "rlhf", name, "max_prompt_length"),
        inputs=of.tokenization_inputs(config, "rlhf", name),
    )


@_rule("rlhf", stage="rlhf", work="training")
def train_rlhf(config: Config, name: str) -> Description:
    return Description(
        settings=config.program_settings("rlhf", name), inputs=of.rlhf_inputs(config, name)
    )


@_rule("eval/rlhf", stage="rlhf", work="evaluation")
def evaluate_rlhf(config: Config, name: str) -> Description:
    return Description(
        settings=of.rlhf_evaluation_settings(config, name),
        inputs=of.rlhf_evaluation_inputs(config, name),
    )


# --- responses to train on --------------------------------------------------------------------


@_rule("tokens/generations", program="tokenize_phase", stage="generations")
def tokenize_generations(config: Config, name: str) -> Description:
    return Description(
        settings=of.tokenization_settings(config, "generations", name, "max_prompt_length"),
        inputs=of.tokenization_inputs(config, "generations", name),
    )


@_rule("generations", stage="generations", work="training")
def generate_responses(config: Config, name: str) -> Description:
    return Description(
        settings=of.sampling_settings(config, name), inputs=of.generation_inputs(config, name)
    )


@_rule("scores", stage="generations", work="evaluation")
def score_responses(config: Config, name: str) -> Description:
    return Description(
        settings=config.program_settings("generations", name),
        inputs=of.scoring_inputs(config, name),
    )


@_rule("data")
def select_responses(config: Config, name: str) -> Description:
    return Description(
        settings=of.selection_settings(config, name), inputs=of.selection_inputs(config, name)
    )


@_rule("gate")
def check_gate(config: Config, stage: str, name: str) -> Description:
    return Description(
        settings=of.gate_settings(config, stage, name),
        inputs={"evaluation": (f"evaluate_{stage}", name)},
    )


# --- pages ------------------------------------------------------------------------------------


@_rule("report", shows_provenance=True)
def draw_report(config: Config, stage: str, name: str) -> Description:
    return Description(
        settings={"language": config.values["language"]},
        inputs=of.report_inputs(config, stage, name),
    )


@_rule("record", shows_provenance=True)
def write_record(config: Config, stage: str, name: str) -> Description:
    return Description(
        settings={"language": config.values["language"]},
        inputs={
            f"tokens.{stage}": (f"tokenize_{stage}", name),
            f"train_{stage}": (f"train_{stage}", name),
            f"evaluate_{stage}": (f"evaluate_{stage}", name),
        },
    )


@_rule("prompt_eval", work="evaluation")
def prompt_eval(config: Config, stage: str, name: str) -> Description:
    return Description(
        settings=of.prompt_eval_settings(config, stage, name),
        inputs=of.models_of(config, stage, name),
        files=external.prompt_set_files(config, "prompts", stage, name),
    )


@_rule("rw_eval/reward", stage="reward", work="evaluation")
def rw_eval(config: Config, name: str) -> Description:
    return Description(
        settings=of.prompt_page_settings(config, "reward", name),
        inputs={"model": ("train_reward", name)},
        files=external.prompt_set_files(config, "prompts/pairs", "reward", name),
    )


@_rule("compare", shows_provenance=True)
def compare_runs(config: Config, stage: str, names: str) -> Description:
    recipes = config.compared_recipes(stage, names)
    return Description(
        settings={
            "language": config.values["language"],
            "recipes": recipes,
        },
        inputs={
            f"{result}.{recipe}": (f"{verb}_{stage}", recipe)
            for result, verb in (("training", "train"), ("evaluation", "evaluate"))
            for recipe in recipes
            if not is_version(recipe)
        },
        files={
            f"{recipe}/{file}": path
            for recipe, version in config.compared_versions(stage, names).items()
            for file, path in version.files().items()
        },
    )


@_rule("zero", work="training")
def compare_zero(config: Config, stage: str, name: str) -> Description:
    training = RULES[f"train_{stage}"].describe(config, name)
    return Description(
        settings={"steps": config.values["zero"]["steps"]},
        inputs=training.inputs,
        # Including its code.
        specs={"training": (f"train_{stage}", name)},
    )
