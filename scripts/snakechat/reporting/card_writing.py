"""Model cards, which the end of a build writes next to trained models.

Cards are not part of the results: a new wording makes no model stale, and users edit them. A build
writes the cards that are missing, and the results of evaluations into the metadata of all cards, as
the `model-index` of the Hub.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard

from snakechat.config.licenses import declared_licenses
from snakechat.data.model_files import CARD
from snakechat.jobs.specs import Specs
from snakechat.jobs.staleness import Staleness
from snakechat.reporting.labels import headline_paths
from snakechat.reporting.metric_values import read_figure
from snakechat.reporting.model_card import model_card
from snakechat.workflow.digests import fsync
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import manifest_path, read_manifest
from snakechat.workflow.run_record import read_run_record

TASKS = {"reward": "text-classification"}


def write_cards(specs: Specs, recipes: Iterable[tuple[str, str]]) -> None:
    """Write the missing cards of trained models, and the results of evaluations into all.

    Args:
        specs: The specs of the build.
        recipes: Stage and name of each model. One that does not exist has no card.

    Raises:
        InputError: A card cannot be read or written.
    """
    staleness = Staleness(specs)
    for stage, name in recipes:
        card = Path(f"output/{stage}/{name}", CARD)
        old = card.read_text(encoding="utf-8") if card.exists() else None
        new = old or new_card(card.parent, declared_licenses(specs.config))
        if new is None:
            continue
        spec, _ = specs.spec(f"evaluate_{stage}", name)
        evaluation = staleness.result(spec["rule"], name)
        if evaluation is not None:
            metrics = json.loads((evaluation.folder / "metrics.json").read_text())
            lineage = evaluation.manifest["lineage"]
            datasets = evaluated_datasets(f"output/{stage}/{name}", lineage)
            try:
                new = card_with_results(new, stage, name, metrics, datasets)
            except (ValueError, yaml.YAMLError) as error:
                reason = " ".join(str(error).split())
                raise InputError(f"{card}: its metadata cannot be read: {reason}") from None
        if new != old:
            _write_card(card, new)


def new_card(folder: Path, declared: Mapping[str, str]) -> str | None:
    """Return the card of a trained model, or None if the model is not complete.

    declared: The licences in the config, by the path of a source.
    """
    manifest, record = read_manifest(manifest_path(folder)), read_run_record(folder)
    if manifest is None or record is None or not folder.is_dir():
        return None
    return model_card(manifest, record, declared)


def evaluated_datasets(path: str, lineage: Mapping[str, Any]) -> dict[str, str]:
    """Return the datasets of a recipe: the repository, or the name, of each by its name.

    path: Path of the training: output/STAGE/NAME.
    """
    entries = lineage[path]["settings"]["datasets"]
    names = [entry if isinstance(entry, str) else entry[0] for entry in entries]
    imports = {name: lineage.get(f"output/data/{name}", {"settings": {}}) for name in names}
    return {name: imports[name]["settings"].get("hub", name) for name in names}


def card_with_results(
    card: str, stage: str, name: str, metrics: Mapping[str, Any], datasets: Mapping[str, str]
) -> str:
    """Return a card with the results of an evaluation in its metadata, in place of earlier ones.

    Args:
        card: The text of the card, which a person may have edited.
        stage: Stage of the recipe.
        name: Name of the recipe.
        metrics: Content of the evaluation's metrics.json.
        datasets: The datasets of its held-out rows: repository, or name, by name.

    Raises:
        ValueError, yaml.YAMLError: The metadata of the card cannot be read.
    """
    updated = ModelCard(card, ignore_metadata_errors=False)
    data: Any = updated.data
    data.model_name = name
    data.pipeline_tag = TASKS.get(stage, "text-generation")
    data.eval_results = [
        EvalResult(
            task_type=data.pipeline_tag,
            dataset_type=next(iter(datasets.values())) if len(datasets) == 1 else "mixed",
            dataset_name=f"held-out rows of {', '.join(datasets)}",
            metric_type=path.rpartition(".")[2],
            metric_name=path,
            metric_value=float(f"{figure.value:.6g}"),
        )
        for path in headline_paths(stage, metrics)
        if (figure := read_figure(metrics, path)) and math.isfinite(figure.value)
    ]
    return str(updated)


def _write_card(card: Path, text: str) -> None:
    # Not next to the card: after a kill, it would be a file of the result.
    folder = card.parent.resolve()
    temporary = folder.with_name(f".{folder.name}.card")
    try:
        temporary.write_text(text)
        fsync(temporary)
        temporary.replace(card)
    except OSError as error:
        raise InputError(f"{card} cannot be written: {error.strerror}") from None
