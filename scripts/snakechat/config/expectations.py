"""What a recipe expects of its evaluation: `expect` and `not_worse_than`.

Expectations are no settings of a training or an evaluation. Reports and records have them in their
specs, and each build judges them at its end (snakechat.reporting.verdicts).
"""

import json
from pathlib import Path
from typing import Any

from snakechat.config.errors import ConfigError
from snakechat.config.hints import available
from snakechat.config.recipes import STAGES, Config
from snakechat.jobs.settings import Jobs, held_out_datasets, rlhf_evaluation_settings
from snakechat.workflow.errors import InputError

# Metrics of metrics.json. Perplexities have an interval, and fractions of pairs one by the number
# of pairs; of responses, all but those of single datasets have one.
PERPLEXITIES = ("after.perplexity", "after.response_perplexity")
PAIR_FRACTIONS = ("accuracy", "ties", "longer_wins_accuracy")
PAIRS = (*PAIR_FRACTIONS, "loss", "margin", "calibration_error")
RESPONSES = ("length", "ended_by_eos", "distinct_1", "distinct_2", "repetition")
# What a model may start from in RLHF, the last one in training first.
INITIAL = ("dpo", "sft", "base")

# Of the verdicts in model cards.
CARD_HEADING = "## Expectations\n"

# The key in baseline files that says what they are.
BASELINE = "snakechat_baseline"


def expected_metrics(config: Config, stage: str, name: str) -> list[str]:
    """Return the metrics that the evaluation of a recipe has, as paths in metrics.json."""
    if stage == "sft":
        return list(PERPLEXITIES)
    datasets = list(dict.fromkeys(held_out_datasets(config, stage, name)))
    if stage != "rlhf":
        single = datasets if len(datasets) > 1 else []
        return [*PAIRS, *(f"by_dataset.{dataset}.{key}" for dataset in single for key in PAIRS)]
    settings = rlhf_evaluation_settings(config, name)
    behind = config.recipes_behind(*config.actor(name))
    others = [model for model in INITIAL if model == "base" or model in behind]
    scores = ["score"] + ["judge_score"] * (settings["judge"] is not None)
    exact = ["success"] * (settings["exact_check"] is not None)
    of_model = [*scores, *exact, *(f"greedy_{key}" for key in exact), f"kl_to_{others[0]}"]
    of_model = [f"rlhf.{key}" for key in (*of_model, *RESPONSES)]
    judge = ["llm_judge"] if settings["llm_judge"] else []
    return [
        *of_model,
        *(f"{key}_difference" for key in (*scores, *exact)),
        *(f"wins.rlhf.{other}.{key}" for other in others for key in scores),
        *(f"wins.rlhf.{others[0]}.{key}" for key in judge),
        *(f"by_dataset.{dataset}.{key}" for dataset in datasets for key in of_model),
    ]


def has_interval(stage: str, metric: str) -> bool:
    """Return whether a metric has an interval."""
    if stage == "rlhf":
        return not metric.startswith("by_dataset.")
    if stage == "sft":
        return metric in PERPLEXITIES
    return metric.rpartition(".")[2] in PAIR_FRACTIONS


def check_expectations(config: Config) -> None:
    """Check that recipes expect metrics that their evaluations have.

    Raises:
        ConfigError: A metric or a recipe does not exist, or has no interval.
    """
    for stage in STAGES:
        for name in config.values[stage]["recipes"]:
            recipe = config.recipe(stage, name)
            place = f"config: {stage}.recipes.{name}"
            if recipe["expect"]:
                _check_metrics(config, stage, name, recipe["expect"])
            baseline = recipe.get("not_worse_than")
            if baseline is None:
                continue
            if baseline == name:
                raise ConfigError(f"{place}.not_worse_than names the recipe itself: name another")
            if not is_file(baseline):
                config.entry(f"{stage}.recipes", baseline, f"{place[8:]}.not_worse_than")


def _check_metrics(config: Config, stage: str, name: str, expect: dict[str, Any]) -> None:
    """Check that an evaluation has the expected metrics, with an interval where it is needed."""
    metrics = expected_metrics(config, stage, name)
    for metric, bounds in expect.items():
        place = f"config: {stage}.recipes.{name}.expect"
        if metric not in metrics:
            raise ConfigError(
                f"{place}: the evaluation has no metric {metric!r} {available(metric, metrics)}"
            )
        by = bounds.get("by", "value")
        if by != "value" and not has_interval(stage, metric):
            raise ConfigError(
                f"{place}.{metric}: {metric} has no interval to compare by {by}: omit by"
            )
        if bounds.get("min", float("-inf")) > bounds.get("max", float("inf")):
            raise ConfigError(f"{place}.{metric}: min is more than max: swap them")


def is_file(baseline: str) -> bool:
    """Return whether `not_worse_than` names a file; no recipe has a name that ends in .json."""
    return baseline.endswith(".json")


def is_judged(config: Config, stage: str, name: str) -> bool:
    """Return whether a build judges a recipe, or its model card has verdicts of an earlier one."""
    recipe = config.recipe(stage, name)
    if recipe["expect"] or recipe.get("not_worse_than") is not None:
        return True
    try:
        return CARD_HEADING in Path(f"output/{stage}/{name}/README.md").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def expectations(config: Config, stage: str, name: str) -> dict[str, Any]:
    """Return what a recipe expects, as specs have it; {} if it expects nothing.

    `baseline` is the content of the file that `not_worse_than` names. A recipe that it names is an
    input of jobs (baseline_inputs).

    Raises:
        InputError: The file is no baseline of this stage.
    """
    recipe = config.recipe(stage, name)
    expected: dict[str, Any] = {}
    if recipe["expect"]:
        expected["expect"] = recipe["expect"]
    baseline = recipe.get("not_worse_than")
    if baseline is not None:
        expected["not_worse_than"] = baseline
        if is_file(baseline):
            expected["baseline"] = _read_baseline(config, stage, name, baseline)
    return expected


def expectation_settings(config: Config, recipes: dict[str, str]) -> dict[str, Any]:
    """Return the settings of a page with what its recipes expect, by stage; {} for nothing."""
    found = {stage: expectations(config, stage, name) for stage, name in recipes.items()}
    found = {stage: expected for stage, expected in found.items() if expected}
    return {"expectations": found} if found else {}


def baseline_inputs(config: Config, recipes: dict[str, str]) -> Jobs:
    """Return the evaluations of the recipes that recipes must not be worse than, by stage."""
    baselines = {
        stage: config.recipe(stage, name).get("not_worse_than") for stage, name in recipes.items()
    }
    return {
        f"baseline.{stage}": (f"evaluate_{stage}", baseline)
        for stage, baseline in baselines.items()
        if baseline is not None and not is_file(baseline)
    }


def _read_baseline(config: Config, stage: str, name: str, file: str) -> dict[str, Any]:
    """Return the content of a baseline file."""
    place = f"config: {stage}.recipes.{name}.not_worse_than"
    path = config.local_path(file)
    hint = f"write one with python scripts/bless.py output/{stage}/RECIPE {path}"
    try:
        baseline = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{place}: {path}: {error.strerror}: {hint}") from None
    except ValueError:
        baseline = None
    if not _is_baseline(baseline):
        raise InputError(f"{place}: {path} is no baseline: {hint}")
    if baseline["stage"] != stage:
        raise InputError(
            f"{place}: {path} is a baseline of stage {baseline['stage']}, expected {stage}: {hint}"
        )
    return dict(baseline)


def _is_baseline(content: Any) -> bool:
    """Return whether the content of a JSON file is a baseline."""
    if not isinstance(content, dict) or content.get(BASELINE) != 1:
        return False
    figures, measures = content.get("figures"), content.get("measures")
    texts = [content.get("stage"), content.get("recipe")]
    return (
        isinstance(figures, dict)
        and len(figures) > 0
        and isinstance(measures, dict)
        and all(isinstance(text, str) for text in (*texts, *measures.values()))
        and all(_is_figure(figure) for figure in figures.values())
    )


def _is_figure(figure: Any) -> bool:
    """Return whether a value is [value, [low, high]]."""
    match figure:
        case [int() | float(), [int() | float(), int() | float()]]:
            return True
    return False
