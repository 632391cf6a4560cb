"""The transformers config of a planned job's models, which may not exist yet."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snakechat.data.model_files import is_classifier
from snakechat.planning.activation_memory import SCORE, SFT, ModelSpec
from snakechat.planning.hub_catalog import MODEL_CONFIGS
from snakechat.planning.memory import model_folder_bytes
from snakechat.planning.plan import Plan
from snakechat.workflow.errors import InputError

# dtype of a base model's files, by the rule that makes them.
BASE_MODEL_DTYPES = {"fetch_model": "bf16", "init_model": "fp32"}


def model_config(path: str, plan: Plan) -> str:
    """Return the config of the model in a result folder, as JSON.

    A trained model has the config of its base model. That of a downloaded model is read from its
    files or, before the download, from the hub catalog.

    Raises:
        InputError: The config of the base model is not known before the download.
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
        # A model with a path is of an object store.
        name = settings.get("hub", source)
        if name not in MODEL_CONFIGS:
            raise InputError(
                f"the size of {name} is not known before its download: build {path} first"
            )
        return json.dumps(MODEL_CONFIGS[name])
    key = "actor" if spec["rule"] == "train_rlhf" else "model"
    return model_config(spec["inputs"][key]["path"], plan)


def base_model_bytes(path: str, plan: Plan) -> float | None:
    """Return the size of a base model's files in bytes; None if the result is not a base model."""
    dtype = BASE_MODEL_DTYPES.get(plan.jobs[path].spec["rule"])
    if dtype is None:
        return None
    config = model_config(path, plan)
    loss = SCORE if is_classifier(json.loads(config)) else SFT
    return model_folder_bytes(ModelSpec(config, loss, dtype))


def vocabulary_size(tokenizer: Mapping[str, Any], folder: str) -> int:
    """Return the number of tokens of a tokenizer: of the one to be trained, or of its folder."""
    if "vocab_size" in tokenizer:
        return tokenizer["vocab_size"]
    content = json.loads(Path(folder, "tokenizer.json").read_text())
    ids = [*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])]
    return max(ids) + 1
