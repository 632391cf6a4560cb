"""The README.md of a checkpoint folder: what it is, what it was made from, how to load it."""

import json

from snakechat.workflow.code_digests import REQUIREMENTS, pinned_versions
from snakechat.workflow.digests import digest
from snakechat.workflow.distributed import rank
from snakechat.workflow.lineage import in_columns

KINDS = {
    "train_sft": ("AutoModelForCausalLM", "a chat model, fine-tuned on chosen responses"),
    "train_reward": ("AutoModelForSequenceClassification", "a reward model"),
    "train_dpo": ("AutoModelForCausalLM", "a chat model, trained on pairs by DPO"),
    "train_rlhf": ("AutoModelForCausalLM", "a chat model, trained on scores of its own responses"),
}
# Whose versions a reader asks for; the spec has the digest of all pins.
SOFTWARE = ("torch", "transformers", "deepspeed", "peft", "tokenizers", "safetensors", "numpy")


def write_card(job):
    """Write job.result/README.md. The same build gives the same card: pins, no clock, no host.

    Of several processes the first one writes.
    """
    if rank() > 0:
        return
    spec = job.spec
    auto_class, what = KINDS[spec["rule"]]
    rows = [
        f"| {path} | {origin_of(job.lineage[path])} | `{job.lineage[path]['spec'][:16]}` |"
        for column in in_columns(job.lineage)
        for path in column
    ]
    versions = pinned_versions(REQUIREMENTS)
    talk = f"`python scripts/chat.py {spec['path']}` talks to it.\n\n"
    figures = spec["path"].replace("output", "output/eval", 1)
    card = f"""---
{hub_metadata(job)}---
# {spec["name"]}

{spec["path"]} is {what}.

```python
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{spec["path"]}")
tokenizer = AutoTokenizer.from_pretrained("{spec["path"]}")
```

{talk if "Causal" in auto_class else ""}## Made from

Spec `{digest(spec)}`, seed {spec["settings"]["seed"]}.

| job | source | spec |
|---|---|---|
{chr(10).join(rows)}

`manifest.json` has the settings and findings of these jobs, the digests of code, inputs and all
files here. To build it again: `snakemake --cores 1 {spec["path"]}`; to do so in a second folder and
compare file by file: `make reproduce TARGET={spec["path"]}`.

Software: {", ".join(f"{name} {versions[name]}" for name in SOFTWARE)}.

## The last step of training

{last_step(job.result)}

`metrics.jsonl` has all steps; `{figures}` of the build has figures of held-out rows.

## Settings

```json
{json.dumps(spec["settings"], indent=1, sort_keys=True)}
```
"""
    (job.result / "README.md").write_text(card)


def last_step(folder):
    """A table of the figures of the last step in metrics.jsonl."""
    *_, last = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [f"| {name} | {value:.6g} |" for name, value in json.loads(last).items()]
    return "\n".join(["| figure | value |", "|---|---|", *rows])


def hub_metadata(job):
    """The YAML that a model hub reads: tags, the base models and datasets that it has, and the
    licence, where base models have one and the same.
    """
    lines = ["library_name: transformers", f"tags: [snakechat, {job.spec['path'].split('/')[1]}]"]
    kinds = {"base_model": "fetch_model", "datasets": "import_dataset"}
    for key, rule in kinds.items():
        found = {
            entry["settings"]["hub"]
            for entry in job.lineage.values()
            if entry["rule"] == rule and "hub" in entry["settings"]
        }
        if found:
            lines.append(f"{key}: {json.dumps(sorted(found))}")
    licences = {
        entry["facts"].get("licence")
        for entry in job.lineage.values()
        if entry["rule"] == "fetch_model"
    }
    if len(licences) == 1 and licences != {None}:
        lines.append(f"license: {json.dumps(*licences)}")
    return "\n".join(lines) + "\n"


def origin_of(entry):
    """Where a job of the lineage took what it did not get from other jobs."""
    settings, licence = entry["settings"], entry["facts"].get("licence")
    under = f", licence {licence}" if licence else ""
    if "hub" in settings:
        # The commit that was found, whatever the revision is called.
        return f"{settings['hub']} at {entry['facts'].get('commit', settings['revision'])}{under}"
    if entry["files"]["number"]:
        return f"{entry['files']['number']} files, `{entry['files']['digest'][:16]}`{under}"
    if "generate" in settings:
        return f"generated ({settings['generate']}, seed {settings['seed']})"
    if "init" in settings:
        return f"random weights (seed {settings['seed']})"
    return ""
