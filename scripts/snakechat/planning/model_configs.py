"""The transformers config of a planned job's models, which may not exist yet."""

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from snakechat.data.model_files import is_classifier
from snakechat.jobs.plan import Plan
from snakechat.planning.activation_memory import SCORE, SFT, ModelSpec
from snakechat.planning.memory import weight_bytes
from snakechat.workflow.errors import InputError

# dtype of a base model's files, by the rule that makes them.
BASE_MODEL_DTYPES = {"fetch_model": "bf16", "init_model": "fp32"}


def model_config(path: str, plan: Plan) -> str:
    """Return the config of the model in a result folder, as JSON.

    A trained model has the config of its base model. That of a downloaded model is read from its
    files or, before the download, from the Hub.

    Raises:
        InputError: The config of the base model is not known before the download, or the Hub is
            unavailable.
    """
    spec, source = plan.jobs[path].spec, plan.jobs[path].options.source
    settings = spec["settings"]
    if spec["rule"] == "init_model":
        size = vocabulary_size(settings["tokenizer"], source)
        return json.dumps({**settings["init"], "vocab_size": size})
    if spec["rule"] == "fetch_model":
        for folder in (path, source):
            if folder and Path(folder, "config.json").exists():
                return Path(folder, "config.json").read_text()
        if "hub" in settings:
            return hub_config(settings["hub"], settings["revision"])
        # Of an object store.
        raise InputError(f"the size of {source} is not known before its download: build {path}")
    key = "actor" if spec["rule"] == "train_rlhf" else "model"
    return model_config(spec["inputs"][key]["path"], plan)


@cache
def hub_config(name: str, revision: str) -> str:
    """Return the config of a model of the Hub, the only file of it that is downloaded."""
    # The client of the Hub takes a second to import.
    from snakechat.data.hub import fetch

    folder, _, _ = fetch(name, "model", revision, lambda *_: ["config.json"])
    return Path(folder, "config.json").read_text()


def base_model_bytes(path: str, plan: Plan) -> float:
    """Return the size of a base model's files in bytes; nan if the result is not a base model."""
    dtype = BASE_MODEL_DTYPES.get(plan.jobs[path].spec["rule"])
    if dtype is None:
        return math.nan
    config = model_config(path, plan)
    loss = SCORE if is_classifier(json.loads(config)) else SFT
    return weight_bytes(ModelSpec(config, loss, dtype))


def vocabulary_size(tokenizer: Mapping[str, Any], folder: str) -> int:
    """Return the number of tokens of a tokenizer: of the one to be trained, or of its folder."""
    if "vocab_size" in tokenizer:
        return tokenizer["vocab_size"]
    content = json.loads(Path(folder, "tokenizer.json").read_text())
    ids = [*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])]
    return max(ids) + 1
