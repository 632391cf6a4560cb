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

from snakechat.data.cards import source_licenses
from snakechat.data.model_files import CARD
from snakechat.jobs.files import declared_licenses
from snakechat.jobs.rules import RULES
from snakechat.jobs.specs import Specs
from snakechat.jobs.staleness import Staleness
from snakechat.pages.jobs import describe_origin, rebuild_command
from snakechat.pages.metrics import headline_paths, read_figure
from snakechat.pages.page import MARKDOWN, table_of
from snakechat.workflow.digests import digest, write_atomically
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import (
    Lineage,
    Manifest,
    manifest_path,
    merge_lineages,
    named_lineage,
    read_manifest,
    read_run_record,
    result_id,
    upstream_first,
)
from snakechat.workflow.placement import placement_of

# Libraries whose versions the card names, if the run had them; the spec has all pins.
LIBRARIES = ["trl", "torch", "transformers", "deepspeed", "peft"]
LIBRARIES += ["tokenizers", "safetensors", "numpy"]
# The last line of a card that nobody has edited.
SEAL = "<!-- Written by Snakechat; an edited card is left alone. {digest} -->\n"


def write_cards(specs: Specs, recipes: Iterable[tuple[str, str]]) -> None:
    """Write the cards of trained models, except those that a person has edited.

    Args:
        specs: The specs of the build.
        recipes: Stage and name of each model. One that does not exist has no card.

    Raises:
        InputError: A card cannot be read or written.
    """
    staleness = Staleness(specs)
    for stage, name in recipes:
        folder = Path(f"output/{stage}/{name}")
        manifest, record = read_manifest(manifest_path(folder)), read_run_record(folder)
        if manifest is None or record is None or not folder.is_dir():
            continue
        evaluation = staleness.result(f"evaluate_{stage}", name)
        metrics = evaluation and json.loads((evaluation.folder / "metrics.json").read_text())
        path, names = str(folder), specs.names(f"train_{stage}", name)
        lineage = named_lineage({path: result_id(manifest)}, merge_lineages([manifest]), names)
        del lineage[path]
        licenses = declared_licenses(specs.config)
        datasets = evaluated_datasets(specs.config.blend(stage, name), lineage)
        text = model_card(path, manifest, lineage, record, licenses, metrics or {}, datasets)
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
    manifest: Manifest,
    lineage: Lineage,
    record: Mapping[str, Any],
    declared_licenses: Mapping[str, str],
    metrics: Mapping[str, Any],
    datasets: Mapping[str, str],
) -> str:
    """Return the text of the card of a trained model.

    It contains no times and no host names, so that two builds have the same card.

    Args:
        path: Path of the model: output/STAGE/NAME.
        manifest: The manifest of the training.
        lineage: The jobs before it, by path.
        record: The record of the run that made the model.
        declared_licenses: The licences in the config, by the path of a source.
        metrics: Content of the evaluation's metrics.json; empty without an evaluation.
        datasets: What evaluated_datasets returns.
    """
    spec, facts, found = manifest["spec"], manifest["facts"], record["versions"]
    name, placement = path.rpartition("/")[2], placement_of(record["placement"])
    auto_class = "AutoModelForCausalLM"
    if RULES[spec["rule"]].loss == "score":
        auto_class = "AutoModelForSequenceClassification"
    licenses = source_licenses(lineage, declared_licenses)
    sources = {each: source(lineage[each], licenses.get(each)) for each in upstream_first(lineage)}
    body = MARKDOWN.get_template("model_card.md").render(
        name=name,
        path=path,
        description=RULES[spec["rule"]].model,
        auto_class=auto_class,
        is_chat_model="Causal" in auto_class,
        spec_digest=digest(spec),
        seed=spec["settings"].get("seed"),
        sources=table_of("", sources, corner="job"),
        command=rebuild_command(path, record),
        evaluation=path.replace("output", "output/eval", 1),
        gpus=placement.nodes * placement.gpus_per_node,
        threads=placement.threads,
        hermetic=record.get("hermetic"),
        versions=", ".join(f"{name} {found[name]}" for name in LIBRARIES if name in found),
        saved_step=facts.get("saved_step"),
        changed_weights=facts.get("changed_weights"),
        saved_dtype=spec["settings"].get("save_dtype") or spec["settings"].get("dtype"),
        settings=json.dumps(spec["settings"], indent=1, sort_keys=True),
    )
    data = card_data(name, spec, lineage, licenses, metrics, datasets)
    text = f"---\n{data.to_yaml()}\n---\n{body}"
    return text + SEAL.format(digest=digest(text))


def card_data(
    name: str,
    spec: Mapping[str, Any],
    lineage: Lineage,
    licenses: Mapping[str, str | None],
    metrics: Mapping[str, Any],
    datasets: Mapping[str, str],
) -> ModelCardData:
    """Return the metadata of a card. Arguments: those of model_card, and all licences by path."""
    stage = spec["rule"].removeprefix("train_")
    task = "text-classification" if stage == "reward" else "text-generation"
    # The Hub names one licence: that of all base models.
    found = {licenses[path] for path, entry in lineage.items() if entry["rule"] == "fetch_model"}
    license = (found.pop() if len(found) == 1 else None) or ""
    # The Hub takes names of its own; another one is "other (NAME)" in facts.
    license, _, license_name = license.removesuffix(")").partition(" (")
    results = [
        EvalResult(
            task_type=task,
            dataset_type=next(iter(datasets.values())) if len(datasets) == 1 else "mixed",
            dataset_name=f"held-out rows of {', '.join(datasets)}",
            metric_type=path.rpartition(".")[2],
            metric_name=path,
            metric_value=float(f"{figure.value:.6g}"),
        )
        for path in (headline_paths(stage, metrics) if metrics else ())
        if (figure := read_figure(metrics, path)) and math.isfinite(figure.value)
    ]
    hub = {
        rule: sorted(
            entry["settings"]["hub"]
            for entry in lineage.values()
            if entry["rule"] == rule and "hub" in entry["settings"]
        )
        for rule in ("fetch_model", "import_dataset")
    }
    return ModelCardData(
        library_name="transformers",
        tags=["snakechat", stage],
        base_model=hub["fetch_model"] or None,
        datasets=hub["import_dataset"] or None,
        license=license or None,
        license_name=license_name or None,
        model_name=name if results else None,
        pipeline_tag=task,
        eval_results=results or None,
    )


def evaluated_datasets(blend: Iterable[Sequence[Any]], lineage: Lineage) -> dict[str, str]:
    """Return the datasets of a recipe: the repository, or the name, of each by its name.

    blend: [dataset, weight] of each.
    """
    imports = {name: lineage.get(f"output/data/{name}", {"settings": {}}) for name, _ in blend}
    return {name: each["settings"].get("hub", name) for name, each in imports.items()}


def source(job: Mapping[str, Any], license: str | None) -> dict[str, str]:
    """Return the cells of a job in the table of sources."""
    facts = job["facts"]
    rows = [f"{split} {size['rows']:,}" for split, size in facts.get("size", {}).items()]
    rows += [
        f"{split} without {reason} {count:,}"
        for split, reasons in facts.get("dropped", {}).items()
        for reason, count in reasons.items()
    ]
    return {
        "source": describe_origin(job, license),
        "languages": ", ".join(facts.get("languages", ())),
        "rows": ", ".join(rows),
        "spec": job["spec"][:16],
    }
