"""The README.md of a model folder: what the model is, what it was made from and how to load it."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snakechat.data.licenses import source_licenses
from snakechat.reporting.pages import write_page
from snakechat.workflow.digests import digest
from snakechat.workflow.distributed import rank
from snakechat.workflow.job import Job
from snakechat.workflow.lineage import lineage_columns
from snakechat.workflow.pins import installed_versions

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
# Libraries whose installed versions the card names, if they are installed; the spec has all pins.
LIBRARIES = ("torch", "transformers", "deepspeed", "peft", "tokenizers", "safetensors", "numpy")


def write_card(job: Job[Any]) -> None:
    """Write job.result/README.md. Of several processes, the first one writes.

    The card contains no times and no host names, so that two builds write the same bytes.
    """
    if rank() > 0:
        return
    spec = job.spec
    path = spec["path"]
    auto_class, description = KINDS[spec["rule"]]
    versions = installed_versions(LIBRARIES)
    licenses = source_licenses(job.lineage, job.placement.get("licenses", {}))
    write_page(
        job.result / "README.md",
        "model_card.md",
        name=spec["name"],
        path=path,
        description=description,
        auto_class=auto_class,
        is_chat_model="Causal" in auto_class,
        stage=path.split("/")[1],
        hub_ids=hub_ids(job.lineage),
        license=common_license(job.lineage, licenses),
        spec_digest=digest(spec),
        seed=spec["settings"]["seed"],
        sources=[
            [
                upstream,
                origin_of(job.lineage[upstream], licenses.get(upstream)),
                f"`{job.lineage[upstream]['spec'][:16]}`",
            ]
            for column in lineage_columns(job.lineage)
            for upstream in column
        ],
        commands=rebuild_commands(path, job.placement.get("options", ())),
        evaluation=path.replace("output", "output/eval", 1),
        processors=processors(job.placement),
        versions=", ".join(f"{library} {version}" for library, version in versions.items()),
        last_step=last_step(job.result),
        settings=json.dumps(spec["settings"], indent=1, sort_keys=True),
    )


def processors(placement: Mapping[str, Any]) -> str:
    """Describe what a model was trained on: on the CPU, results depend on the threads."""
    nodes, gpus = placement["nodes"], placement["gpus_per_node"]
    if gpus:
        return f"{nodes * gpus} GPU{'s' * (nodes * gpus > 1)}"
    return f"CPU, {placement['threads']} threads (placement.threads, whatever --cores is)"


def rebuild_commands(path: str, options: list[str] | tuple[str, ...]) -> dict[str, str]:
    """Return the shell commands that build a target again and that compare a second build with it.

    Args:
        path: Path of the result, as Snakemake's target.
        options: --configfile and --config of the build, as words of a command line.
    """
    words = shlex.join(options)
    compare = f"make reproduce TARGET={path}"
    if options:
        # Make expands $ before the shell sees it.
        compare += f" OPTIONS={shlex.quote(words)}".replace("$", "$$")
    return {"build": f"snakemake --cores 1 {path} {words}".rstrip(), "compare": compare}


def last_step(folder: Path) -> list[list[str]]:
    """Return rows of the metrics of the last step in metrics.jsonl."""
    *_, last = (folder / "metrics.jsonl").read_text().splitlines()
    return [[name, f"{value:.6g}"] for name, value in json.loads(last).items()]


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


def origin_of(entry: dict[str, Any], license: str | None) -> str:
    """Describe the external source of a job in the lineage; "" if all its inputs are jobs."""
    settings = entry["settings"]
    suffix = f", licence {license}" if license else ""
    if "hub" in settings:
        # The commit, because a revision may be a branch.
        return f"{settings['hub']} at {entry['facts'].get('commit', settings['revision'])}{suffix}"
    if entry["files"]["number"]:
        return f"{entry['files']['number']} files, `{entry['files']['digest'][:16]}`{suffix}"
    if "generate" in settings:
        return f"generated ({settings['generate']}, seed {settings['seed']})"
    if "init" in settings:
        return f"random weights (seed {settings['seed']})"
    return ""
