"""The results page of a report: what was run, and the metrics on held-out rows and prompts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from snakechat.config.references import (
    Reference,
    RewardReferences,
    parse_reference,
    weighted_references,
)
from snakechat.config.reward_functions import weighted_functions
from snakechat.evaluation.comparisons import initial_model
from snakechat.reporting.formatting import (
    format_estimate,
    format_number,
    format_percent,
    format_with_interval,
)
from snakechat.reporting.intervals import proportion_interval
from snakechat.reporting.labels import MODELS, PAIRS, PERPLEXITIES, RESPONSES, WIN_CRITERIA
from snakechat.reporting.model_card import origin_of
from snakechat.reporting.pages import write_page
from snakechat.reporting.plots import TradeOff

Metrics = dict[str, Any]
# Caption, head (possibly empty) and rows.
Table = tuple[str, list[str], list[list[Any]]]


def write_results(
    path: Path, name: str, lineage: dict[str, Any], metrics: dict[str, Metrics]
) -> None:
    """Write the results of a recipe as a page.

    Args:
        path: HTML file to write.
        name: Name of the RLHF recipe.
        lineage: All upstream jobs of the report.
        metrics: metrics.json of the evaluations, by stage.
    """
    write_page(
        path,
        "report_results.html",
        language="en",
        title=f"{name}: results",
        summary=list(summary(metrics)),
        tables=[
            ("Recipe", [], recipe_rows(name, lineage)),
            *stage_tables(metrics),
            response_table(metrics["rlhf"]),
            win_table(metrics["rlhf"]),
        ],
    )


def summary(metrics: dict[str, Metrics]) -> Iterator[str]:
    """Yield the main results as sentences."""
    if "reward" in metrics:
        pairs, accuracy = metrics["reward"]["pairs"], metrics["reward"]["accuracy"]
        low, high = map(format_percent, proportion_interval(accuracy, pairs))
        yield (
            f"The reward model ranks {format_percent(accuracy)} of {format_number(pairs)} held-out"
            f" pairs correctly (95 % interval: {low} to {high})."
        )
    rlhf = metrics["rlhf"]
    initial = initial_model(rlhf)
    for key, criterion in WIN_CRITERIA.items():
        if won := rlhf["wins"]["rlhf"][initial].get(key):
            low, high = map(format_percent, won["interval_95"])
            rate = format_percent(won["mean"])
            yield (
                f"Responses of the RLHF model win against those of the {MODELS[initial]} model in"
                f" {rate} of"
                f" comparisons by {criterion} (95 % interval: {low} to {high})."
            )


def ordered_models(metrics: Metrics) -> list[str]:
    """Return the evaluated models: those of the recipe in the order of training, then others."""
    evaluated = metrics["intervals_95"]
    others = [model for model in evaluated if model not in MODELS]
    return [model for model in MODELS if model in evaluated] + others


def model_label(model: str) -> str:
    """Return the name of a model on pages."""
    return MODELS.get(model, model)


def recipe_rows(name: str, lineage: dict[str, Any]) -> list[list[Any]]:
    """Return rows of the recipe, its models and its data. lineage: all upstream jobs."""
    settings = lineage[f"output/rlhf/{name}"]["settings"]
    rows = [
        ["recipe", name],
        ["algorithm", settings["algorithm"]],
        ["seed", str(settings["seed"])],
        model_row(parse_reference(settings["actor"], "sft")),
        ["reward model", weighted_sum(settings["reward"])],
    ]
    if functions := settings["reward_functions"]:
        weights = weighted_functions(functions)
        terms = (
            f"{weight} * {function}" + "".join(f" {key}={value!r}" for key, value in given.items())
            for function, (weight, given) in weights.items()
        )
        rows.append(["reward functions", ", ".join(terms)])
    kinds = {
        "import_dataset": "dataset",
        "init_model": "base model",
        "fetch_model": "base model",
    }
    for job in lineage.values():
        if job["rule"] in kinds:
            rows.append([f"{kinds[job['rule']]}: {job['name']}", origin_of(job)])
    for job in lineage.values():
        for entry in job.get("accepted", ()):
            rows.append([f"accepted: {job['rule']} {job['name']}", accepted_change(entry)])
    return rows


def accepted_change(entry: dict[str, Any]) -> str:
    """Describe a change after which a result was accepted (scripts/accept.py)."""
    return f"{entry['date']}: {entry['because']} ({'; '.join(entry['changes'])})"


def model_row(actor: Reference) -> list[str]:
    """Return the row of the model that RLHF started from."""
    label = "base" if actor.section == "models" else actor.section
    return [f"{MODELS[label]} model", "/".join(actor)]


def weighted_sum(rewards: RewardReferences) -> str:
    """Return reward models as text: reward/NAME, or 0.5 * reward/A, 1 * models/B."""
    weights = weighted_references(rewards)
    names = {text: "/".join(parse_reference(text, "reward")) for text in weights}
    if isinstance(rewards, str):
        return names[rewards]
    return ", ".join(f"{weight} * {names[text]}" for text, weight in weights.items()) or "none"


def stage_tables(metrics: dict[str, Metrics]) -> Iterator[Table]:
    """Yield the tables of held-out rows: SFT, DPO and reward model, those that exist."""
    if "sft" in metrics:
        sft = metrics["sft"]
        yield (
            f"SFT on {format_number(sft['rows'])} held-out rows",
            ["", "before training", "after training"],
            [[label, sft["before"][key], sft["after"][key]] for key, label in PERPLEXITIES.items()],
        )
    for stage, label in (("dpo", "DPO"), ("reward", "Reward model")):
        if stage in metrics:
            yield pair_table(metrics[stage], label)


def pair_table(reward: Metrics, label: str) -> Table:
    """Return the table of the metrics of a reward model or a DPO model on held-out pairs."""

    def row(name: str, fraction: float, pairs: int) -> list[Any]:
        return [name, format_with_interval(fraction, proportion_interval(fraction, pairs))]

    pairs = reward["pairs"]
    keys = ("accuracy", "longer_wins_accuracy", "ties")
    rows = [row(PAIRS[key], reward[key], pairs) for key in keys]
    rows += [
        row(f"accuracy on {dataset}", of["accuracy"], of["pairs"])
        for dataset, of in reward.get("by_dataset", {}).items()
    ]
    rows.append([PAIRS["calibration_error"], reward["calibration_error"]])
    return f"{label} on {format_number(pairs)} held-out pairs", [], rows


def response_table(metrics: Metrics) -> Table:
    """Return the table of metrics of responses to held-out prompts, with a column per model."""
    models = ordered_models(metrics)
    rows = [
        [
            label,
            *(
                format_with_interval(metrics[model][key], metrics["intervals_95"][model][key])
                for model in models
            ),
            format_estimate(metrics.get(f"{key}_difference")),
        ]
        for key, label in RESPONSES.items()
        if key in metrics["rlhf"]
    ]
    by_dataset = metrics.get("by_dataset", {})
    if len(by_dataset) > 1 and "score" in metrics["rlhf"]:
        rows += [
            [
                f"{RESPONSES['score']} on {format_number(means['num_prompts'])} of {dataset}",
                *(means[model]["score"] for model in models),
                "",
            ]
            for dataset, means in by_dataset.items()
        ]
    title = (
        f"Responses to {format_number(metrics['num_prompts'])} held-out prompts,"
        f" {metrics['num_generations']} of each model to each prompt"
    )
    difference = f"RLHF - {MODELS[initial_model(metrics)]}"
    return title, ["", *map(model_label, models), difference], rows


def win_table(metrics: Metrics) -> Table:
    """Return the table of win rates, and of win rates by which response is the longer one."""
    keys = ("longer", "when_longer", "when_not_longer")
    rows = [
        [
            f"{model_label(model)} against {model_label(other)}, by {criterion}",
            format_estimate(won[key]),
            *(won[key].get(name) for name in keys),
        ]
        for model in ordered_models(metrics)
        for other, won in metrics["wins"].get(model, {}).items()
        for key, criterion in WIN_CRITERIA.items()
        if key in won
    ]
    head = [
        "",
        "win rate (a tie is half a win)",
        "longer response (fraction)",
        "win rate if longer",
        "win rate if not longer",
    ]
    return "Win rates and response lengths", head, rows


def win_rates_by_length(metrics: Metrics) -> dict[str, dict[str, TradeOff]]:
    """Return panels of draw_trade_off: mean length of the responses of models, and win rates."""
    panels: dict[str, dict[str, TradeOff]] = {}
    initial = initial_model(metrics)
    for key, criterion in WIN_CRITERIA.items():
        if key not in metrics["wins"]["rlhf"][initial]:
            continue
        models = panels[f"by {criterion}"] = {}
        for model in ordered_models(metrics):
            length = metrics[model]["length"]
            interval = metrics["intervals_95"][model]["length"]
            won = metrics["wins"].get(model, {}).get(initial, {}).get(key)
            if won:
                models[model_label(model)] = (length, interval, won["mean"], won["interval_95"])
            elif model == initial:
                # A model ties with itself.
                models[model_label(model)] = (length, interval, 0.5, None)
    return panels
