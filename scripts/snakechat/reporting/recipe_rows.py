"""What a report was made from: the recipe, its models, its data, and accepted changes."""

from collections.abc import Mapping
from typing import Any

from snakechat.config.references import (
    Reference,
    RewardReferences,
    parse_reference,
    weighted_references,
)
from snakechat.config.reward_functions import weighted_functions
from snakechat.reporting.labels import MODELS
from snakechat.reporting.origins import describe_origin
from snakechat.reporting.page_parts import Table
from snakechat.reporting.translations import Translate


def recipe_table(
    path: str,
    lineage: dict[str, Any],
    licenses: Mapping[str, str | None],
    translate: Translate,
) -> Table:
    """Return the table of a recipe, its models and its data.

    Args:
        path: Path of the training: output/STAGE/NAME.
        lineage: All upstream jobs of the report.
        licenses: The licences of external sources, by path.
    """
    entry = lineage[path]
    settings = entry["settings"]
    rows = [[translate("recipe"), path.removeprefix("output/")]]
    if "algorithm" in settings:
        rows.append([translate("algorithm"), settings["algorithm"]])
    rows.append([translate("seed"), str(settings["seed"])])
    if entry["rule"] == "train_rlhf":
        rows += rlhf_rows(settings, translate)
    kinds = {
        "import_dataset": translate("dataset"),
        "init_model": translate("base model"),
        "fetch_model": translate("base model"),
    }
    for origin, job in lineage.items():
        if job["rule"] in kinds:
            label = f"{kinds[job['rule']]}: {job['name']}"
            rows.append([label, describe_origin(job, licenses.get(origin), translate)])
    for job in lineage.values():
        for accepted in job.get("accepted", ()):
            label = translate("accepted: {job}", job=f"{job['rule']} {job['name']}")
            rows.append([label, accepted_change(accepted)])
    return Table("", [], rows)


def rlhf_rows(settings: dict[str, Any], translate: Translate) -> list[list[str]]:
    """Return rows of the models and functions that an RLHF recipe starts from."""
    rows = [
        model_row(parse_reference(settings["actor"], "sft"), translate),
        [translate("reward model"), weighted_sum(settings["reward"]) or translate("none")],
    ]
    if functions := settings["reward_functions"]:
        terms = (
            f"{weight} * {function}" + "".join(f" {key}={value!r}" for key, value in given.items())
            for function, (weight, given) in weighted_functions(functions).items()
        )
        rows.append([translate("reward functions"), ", ".join(terms)])
    return rows


def accepted_change(entry: dict[str, Any]) -> str:
    """Describe a change after which a result was accepted (scripts/accept.py)."""
    return f"{entry['date']}: {entry['because']} ({'; '.join(entry['changes'])})"


def model_row(actor: Reference, translate: Translate) -> list[str]:
    """Return the row of the model that RLHF started from."""
    label = "base" if actor.section == "models" else actor.section
    return [translate("{model} model", model=translate(MODELS[label])), "/".join(actor)]


def weighted_sum(rewards: RewardReferences) -> str:
    """Return reward models as text: reward/NAME, or 0.5 * reward/A, 1 * models/B; "" for none."""
    weights = weighted_references(rewards)
    names = {text: "/".join(parse_reference(text, "reward")) for text in weights}
    if isinstance(rewards, str):
        return names[rewards]
    return ", ".join(f"{weight} * {names[text]}" for text, weight in weights.items())
