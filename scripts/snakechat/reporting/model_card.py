"""The README.md of a model folder: what the model is, what it was made from and how to load it."""

import json
from collections.abc import Mapping
from typing import Any

from snakechat.data.licenses import is_hub_license, source_licenses
from snakechat.reporting.origins import describe_origin, rebuild_command
from snakechat.reporting.page_rendering import MARKDOWN
from snakechat.workflow.digests import digest
from snakechat.workflow.lineage import upstream_first
from snakechat.workflow.manifest import Manifest
from snakechat.workflow.placement import Placement, placement_of

# The class that loads the model of each rule, and what the model is.
KINDS = {
    "train_sft": ("AutoModelForCausalLM", "a chat model, fine-tuned on chosen responses"),
    "train_reward": (
        "AutoModelForSequenceClassification",
        "a reward model, trained on pairs of responses",
    ),
    "train_dpo": ("AutoModelForCausalLM", "a chat model, trained on pairs of responses with DPO"),
    "train_rlhf": (
        "AutoModelForCausalLM",
        "a chat model, trained with RLHF on scores of its own responses",
    ),
}
# Libraries whose versions the card names, if the run had them; the spec has all pins.
LIBRARIES = ("torch", "transformers", "deepspeed", "peft", "tokenizers", "safetensors", "numpy")


def model_card(
    manifest: Manifest,
    record: Mapping[str, Any],
    declared_licenses: Mapping[str, str],
) -> str:
    """Return the text of the card of a trained model.

    It contains no times and no host names, so that two builds have the same card.

    Args:
        manifest: The manifest of the training.
        record: The record of the run that made the model.
        declared_licenses: The licences in the config, by the path of a source.
    """
    spec, lineage = manifest["spec"], manifest["lineage"]
    path, found = spec["path"], record["versions"]
    auto_class, description = KINDS[spec["rule"]]
    licenses = source_licenses(lineage, declared_licenses)
    return MARKDOWN.get_template("model_card.md").render(
        name=spec["name"],
        path=path,
        description=description,
        auto_class=auto_class,
        is_chat_model="Causal" in auto_class,
        stage=path.split("/")[1],
        metadata=hub_ids(lineage) | license_metadata(common_license(lineage, licenses)),
        spec_digest=digest(spec),
        seed=spec["settings"]["seed"],
        sources=[
            source_row(upstream, lineage[upstream], licenses.get(upstream))
            for upstream in upstream_first(lineage)
        ],
        command=rebuild_command(path, record),
        evaluation=path.replace("output", "output/eval", 1),
        processors=processors(placement_of(record["placement"])),
        versions=", ".join(f"{name} {found[name]}" for name in LIBRARIES if name in found),
        changed_weights=manifest["facts"].get("changed_weights"),
        saved_dtype=spec["settings"]["save_dtype"] or spec["settings"]["dtype"],
        settings=json.dumps(spec["settings"], indent=1, sort_keys=True),
    )


def source_row(path: str, job: Mapping[str, Any], license: str | None) -> list[str]:
    """Return the row of a job in the table of sources."""
    rows = [f"{split} {size['rows']:,}" for split, size in job["facts"].get("size", {}).items()]
    rows += [
        f"{split} without {reason} {count:,}"
        for split, reasons in job["facts"].get("dropped", {}).items()
        for reason, count in reasons.items()
    ]
    languages = ", ".join(job["facts"].get("languages", ()))
    origin = describe_origin(job, license)
    return [path, origin, languages, ", ".join(rows), job["spec"][:16]]


def processors(placement: Placement) -> str:
    """Describe what a model was trained on: on the CPU, results depend on the threads."""
    nodes, gpus = placement.nodes, placement.gpus_per_node
    if gpus:
        return f"{nodes * gpus} GPU{'s' * (nodes * gpus > 1)}"
    return f"CPU, {placement.threads} threads (placement.threads, whatever --cores is)"


def hub_ids(lineage: dict[str, Any]) -> dict[str, list[str]]:
    """Return the base models and datasets that came from the Hugging Face Hub, by metadata key."""
    rules = {"base_model": "fetch_model", "datasets": "import_dataset"}
    found = {
        key: sorted(
            {
                entry["settings"]["hub"]
                for entry in lineage.values()
                if entry["rule"] == rule and "hub" in entry["settings"]
            }
        )
        for key, rule in rules.items()
    }
    return {key: names for key, names in found.items() if names}


def common_license(lineage: dict[str, Any], licenses: Mapping[str, str | None]) -> str | None:
    """Return the licence that all base models have, or None.

    licenses: The licences of all sources, by path.
    """
    found = {licenses[path] for path, entry in lineage.items() if entry["rule"] == "fetch_model"}
    return found.pop() if len(found) == 1 else None


def license_metadata(license: str | None) -> dict[str, str]:
    """Return a licence as metadata of a card, which the Hub rejects if it has another one."""
    if license is None or is_hub_license(license):
        return {} if license is None else {"license": license}
    return {"license": "other", "license_name": license}
