"""Model cards, which the end of a build writes next to trained models.

Cards are not part of the results: a new wording makes no model stale. A build writes the cards that
are missing and those that it wrote itself, with the results of evaluations as the `model-index` of
the Hub. The last line of a card has the digest of the lines before it: a card that a person has
edited no longer matches it, and is left alone.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from snakechat.data.model_files import CARD
from snakechat.jobs.data_jobs import declared_licenses
from snakechat.jobs.rules import RULES
from snakechat.jobs.staleness import PlannedJob
from snakechat.pages.metrics import (
    describe_origin,
    headline_paths,
    read_figure,
    rebuild_command,
)
from snakechat.pages.page import MARKDOWN
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import (
    Lineage,
    digest,
    manifest_path,
    merge_lineages,
    named_lineage,
    read_manifest,
    read_run_record,
    result_id,
    upstream_first,
    write_atomically,
)
from snakechat.workflow.processes import Placement

# Libraries whose versions the card names, if the run had them; the spec has all pins.
LIBRARIES = ["trl", "torch", "transformers", "deepspeed", "peft"]
LIBRARIES += ["tokenizers", "safetensors", "numpy"]
# The last line of a card that nobody has edited.
SEAL = "<!-- Written by Snakechat; an edited card is left alone. {digest} -->\n"


def write_cards(models: Iterable[PlannedJob]) -> None:
    """Write the cards of trained models, except those that a person has edited.

    models: The trainings. A model that does not exist has no card.

    Raises:
        InputError: A card cannot be read or written.
    """
    for model in models:
        folder, jobs, (stage, name) = Path(model.path), model.jobs, model.recipe
        manifest, record = read_manifest(manifest_path(folder)), read_run_record(folder)
        if manifest is None or record is None or not folder.is_dir():
            continue
        made = {model.path: result_id(manifest)}
        lineage = named_lineage(made, merge_lineages([manifest]), model.names)
        evaluation = jobs[f"evaluate_{stage}", name].result
        metrics = evaluation and json.loads((evaluation.folder / "metrics.json").read_text())
        datasets = [dataset for dataset, _ in jobs.config.blend(stage, name)]
        declared = declared_licenses(jobs.config)
        text = model_card(model.path, lineage, record, declared, metrics or {}, datasets)
        card = folder / CARD
        try:
            old = card.read_text(encoding="utf-8") if card.exists() else None
            if old is None or (old != text and is_sealed(old)):
                write_atomically(card, text)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{card} cannot be read or written: {error}") from None


def is_sealed(card: str) -> bool:
    """Return whether a card is as a build has written it."""
    text, _, _ = card.rpartition("<!-- ")
    return card == text + SEAL.format(digest=digest(text))


def model_card(
    path: str,
    lineage: Lineage,
    record: Mapping[str, Any],
    declared: Mapping[str, str],
    metrics: Mapping[str, Any],
    datasets: Sequence[str],
) -> str:
    """Return the text of the card of a trained model.

    It contains no times and no host names, so that two builds have the same card.

    Args:
        path: Path of the model: output/STAGE/NAME.
        lineage: The training and the jobs before it, by path.
        record: The record of the run that made the model.
        declared: The licences in the config, by the path of a source.
        metrics: Content of the evaluation's metrics.json; empty without an evaluation.
        datasets: The datasets of the recipe.
    """
    job, rule = lineage[path], RULES[lineage[path]["rule"]]
    before = {each: lineage[each] for each in upstream_first(lineage) if each != path}
    text = MARKDOWN.get_template("model_card.md").render(
        path=path,
        rule=rule,
        job=job,
        settings=json.dumps(job["settings"], indent=1, sort_keys=True),
        jobs=before,
        origins={name: describe_origin(name, of, declared) for name, of in before.items()},
        command=rebuild_command(path, record),
        evaluation=path.replace("output", "output/eval", 1),
        placement=Placement(**record["placement"]),
        record=record,
        libraries=[name for name in LIBRARIES if name in record["versions"]],
    )
    data = card_data(path, before, declared, metrics, datasets)
    text = f"---\n{data.to_yaml()}\n---\n{text}"
    return text + SEAL.format(digest=digest(text))


def card_data(
    path: str,
    jobs: Lineage,
    declared: Mapping[str, str],
    metrics: Mapping[str, Any],
    datasets: Sequence[str],
) -> ModelCardData:
    """Return the metadata of a card, from the jobs before the training and what model_card has."""
    _, stage, name = path.split("/")
    task = "text-classification" if stage == "reward" else "text-generation"
    # The Hub names one licence, if all base models have the same.
    found = {
        declared.get(path) or job["facts"].get("licence") or ""
        for path, job in jobs.items()
        if job["rule"] == "fetch_model"
    }
    license = found.pop() if len(found) == 1 else ""
    # The Hub takes names of its own; another one is "other (NAME)" in facts.
    license, _, license_name = license.removesuffix(")").partition(" (")
    hub: dict[str, list[str]] = {"fetch_model": [], "import_dataset": []}
    for job in jobs.values():
        if "hub" in job["settings"]:
            hub[job["rule"]].append(job["settings"]["hub"])
    sources = hub["import_dataset"] or datasets
    results = [
        EvalResult(
            task_type=task,
            dataset_type=sources[0] if len(sources) == 1 else "mixed",
            dataset_name=f"held-out rows of {', '.join(datasets)}",
            metric_type=metric.rpartition(".")[2],
            metric_name=metric,
            metric_value=float(f"{figure.value:.6g}"),
        )
        for metric in (headline_paths(stage, metrics) if metrics else ())
        if (figure := read_figure(metrics, metric)) and math.isfinite(figure.value)
    ]
    return ModelCardData(
        library_name="transformers",
        tags=["snakechat", stage],
        base_model=sorted(hub["fetch_model"]) or None,
        datasets=sorted(hub["import_dataset"]) or None,
        license=license or None,
        license_name=license_name or None,
        model_name=name if results else None,
        pipeline_tag=task,
        eval_results=results or None,
    )
