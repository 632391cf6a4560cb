"""Model cards, which the end of a build writes next to trained models.

Cards are not part of the results: a new wording makes no model stale. A build writes the cards that
are missing and those that it wrote itself. The last line of a card has the digest of the lines
before it: a card that a person has edited no longer matches it, and is left alone.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from snakechat.data.model_files import CARD
from snakechat.jobs.rules import RULES
from snakechat.jobs.staleness import PlannedJob
from snakechat.pages.metrics import describe_origin, rebuild_command
from snakechat.pages.page import MARKDOWN
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
LIBRARIES = [
    *("trl", "torch", "transformers", "deepspeed", "peft"),
    *("tokenizers", "safetensors", "numpy"),
]
# The last line of a card that nobody has edited.
SEAL = "<!-- Written by Snakechat; an edited card is left alone. {digest} -->\n"


def write_cards(models: Iterable[PlannedJob]) -> None:
    """Write the cards of trained models, except those that a person has edited.

    models: The trainings. A model that does not exist has no card.
    """
    for model in models:
        folder = Path(model.path)
        manifest, record = read_manifest(manifest_path(folder)), read_run_record(folder)
        if manifest is None or record is None or not folder.is_dir():
            continue
        made = {model.path: result_id(manifest)}
        lineage = named_lineage(made, merge_lineages([manifest]), model.names)
        text = model_card(model.path, lineage, record)
        card = folder / CARD
        # One that is not UTF-8 was edited.
        old = card.read_text(encoding="utf-8", errors="replace") if card.exists() else None
        if old is None or (old != text and is_sealed(old)):
            write_atomically(card, text)


def is_sealed(card: str) -> bool:
    """Return whether a card is as a build has written it."""
    text, _, _ = card.rpartition("<!-- ")
    return card == text + SEAL.format(digest=digest(text))


def model_card(path: str, lineage: Lineage, record: Mapping[str, Any]) -> str:
    """Return the text of the card of a trained model (path), with the record of its run.

    It contains no times and no host names, so that two builds have the same card.
    """
    job, rule = lineage[path], RULES[lineage[path]["rule"]]
    before = {each: lineage[each] for each in upstream_first(lineage) if each != path}
    text = MARKDOWN.get_template("model_card.md").render(
        path=path,
        rule=rule,
        job=job,
        settings=json.dumps(job["settings"], indent=1, sort_keys=True),
        jobs=before,
        origins={name: describe_origin(of) for name, of in before.items()},
        command=rebuild_command(path, record),
        evaluation=path.replace("output", "output/eval", 1),
        placement=Placement(**record["placement"]),
        record=record,
        libraries=[name for name in LIBRARIES if name in record["versions"]],
    )
    text = f"---\n{card_data(path, before).to_yaml()}\n---\n{text}"
    return text + SEAL.format(digest=digest(text))


def card_data(path: str, jobs: Lineage) -> ModelCardData:
    """Return the metadata of the card of a path, from the jobs before the training."""
    stage = path.split("/")[1]
    # The Hub names one licence, if all base models have the same.
    fetched = (job for job in jobs.values() if job["rule"] == "fetch_model")
    found = {job["facts"].get("licence") or "" for job in fetched}
    license = found.pop() if len(found) == 1 else ""
    # The Hub takes names of its own; another one is "other (NAME)" in facts.
    license, _, license_name = license.removesuffix(")").partition(" (")
    sources = [job for job in jobs.values() if "hub" in job["settings"]]
    hub = {
        rule: sorted(job["settings"]["hub"] for job in sources if job["rule"] == rule)
        for rule in ("fetch_model", "import_dataset")
    }
    return ModelCardData(
        library_name="transformers",
        tags=["snakechat", stage],
        base_model=hub["fetch_model"] or None,
        datasets=hub["import_dataset"] or None,
        license=license or None,
        license_name=license_name or None,
        pipeline_tag="text-classification" if stage == "reward" else "text-generation",
    )
