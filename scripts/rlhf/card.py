"""The README.md of a checkpoint folder: what it is, what it was made from, how to load it."""

import json

from rlhf.digests import digest

KINDS = {
    "train_sft": ("AutoModelForCausalLM", "a chat model, fine-tuned on chosen responses"),
    "train_reward": ("AutoModelForSequenceClassification", "a reward model"),
    "train_rlhf": ("AutoModelForCausalLM", "a chat model, trained on a reward model's scores"),
}


def write_card(job):
    """Write job.result/README.md from the spec alone: the same build gives the same card."""
    spec = job.spec
    auto_class, what = KINDS[spec["rule"]]
    made_from = "\n".join(
        f"| {name} | {entry['path']} | `{entry['spec'][:16]}` |"
        for name, entry in sorted(spec["inputs"].items())
    )
    card = f"""---
library_name: transformers
tags: [snakechat, {spec["rule"].removeprefix("train_")}]
---
# {spec["name"]}

{spec["path"]} is {what}. Spec `{digest(spec)}`; `manifest.json` has it whole, with the digests of
all files.

```python
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{spec["path"]}")
tokenizer = AutoTokenizer.from_pretrained("{spec["path"]}")
```

To build it again: `snakemake --cores 1 {spec["path"]}`

| made from | | spec |
|---|---|---|
{made_from}

```json
{json.dumps(spec["settings"], indent=1, sort_keys=True)}
```
"""
    (job.result / "README.md").write_text(card)
