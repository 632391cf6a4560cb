"""Copy models as safetensors.

transformers maps weights of the source into memory, so that a copy of a model of any size needs
little memory.
"""

import json
import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from snakechat.data.model_files import (
    is_classifier,
    language_model_problem,
    load_pretrained,
    read_model_config,
    reward_model_problem,
)
from snakechat.modeling.loading import check_weights, from_pretrained
from snakechat.modeling.models import MAX_LAYERS
from snakechat.modeling.saving import MAX_FILE_SIZE
from snakechat.workflow.errors import InputError

# A file of all weights, or the index of several files, in the order in which transformers prefers
# them.
SOURCES = (
    (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME),
    (WEIGHTS_NAME, WEIGHTS_INDEX_NAME),
)


def copy_model(source: Path, folder: Path) -> None:
    """Copy a causal language model or a reward model as safetensors, in the dtype of its files.

    Weights that the model does not have are not copied.

    Raises:
        InputError: the weights do not match the config: transformers would initialize missing ones
            at random; a file is missing or damaged, or has pickled objects other than tensors,
            which are never loaded; or the model is a classifier that cannot score responses.
    """
    keys = read_model_config(source) or {}
    of_classifier = is_classifier(keys)
    problem = reward_model_problem(keys) if of_classifier else language_model_problem(keys)
    if problem:
        raise InputError(f"the model {problem}")
    auto_class = AutoModelForSequenceClassification if of_classifier else AutoModelForCausalLM
    for path in _weight_files(source):
        _check_file(path)
    config = load_pretrained(AutoConfig, source)
    # A model of that many would take hours to make.
    if (layers := getattr(config, "num_hidden_layers", 0)) > MAX_LAYERS:
        raise InputError(f"config.json has num_hidden_layers: {layers}, at most {MAX_LAYERS}")
    # Kernels of the Hub are code that nobody has checked. Jobs choose their own implementation.
    config._attn_implementation = None
    # That of the files, not the one that the config names.
    config.dtype = None
    model, loading = from_pretrained(auto_class, source, "auto", config)
    check_weights(loading | {"unexpected_keys": set()})
    if of_classifier and not hasattr(model, "score"):
        raise InputError(
            f"{type(model).__name__} has no score at each position: use a classifier of a"
            " decoder-only family"
        )
    # Tools that gather partitions save equal weights in one place, which are not tied.
    used = set[int]()
    for weight in model.parameters():
        if weight.data_ptr() in used:
            weight.data = weight.data.clone()
        used.add(weight.data_ptr())
    model.save_pretrained(folder, max_shard_size=MAX_FILE_SIZE)


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of the weights that transformers loads.

    Raises:
        InputError: there are none, or the index is damaged or names a file that does not exist.
    """
    for single, index in SOURCES:
        if (folder / single).exists():
            return [folder / single]
        if not (folder / index).exists():
            continue
        try:
            names = sorted(set(json.loads((folder / index).read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"{index} is damaged: expected an object with weight_map") from None
        for name in names:
            # Files outside the folder do not belong to the model.
            if Path(name).name != name or not (folder / name).is_file():
                raise InputError(
                    f"{index} names {name}, which the folder does not have: add the file"
                )
        return [folder / name for name in names]
    raise InputError(
        "there are no weights: expected " + " or ".join(name for names in SOURCES for name in names)
    )


def _check_file(path: Path) -> None:
    """Raise InputError if a file is damaged, or has pickled objects other than tensors."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                return
        torch.load(path, map_location="meta", weights_only=True)
    except SafetensorError as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path.name} is damaged ({reason}): download it again") from None
    except pickle.UnpicklingError:
        # torch's message recommends to load them anyway.
        raise InputError(
            f"{path.name} is damaged or has pickled objects other than tensors: download it again,"
            " or use a repository with safetensors"
        ) from None
