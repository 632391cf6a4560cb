"""Copy models as safetensors without loading their weights.

They are mapped from the source, so that a copy of a model of any size needs little memory.
"""

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
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
from snakechat.modeling.deferred_weights import names_in_model
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

# Weights by their names in the files.
Tensors = dict[str, torch.Tensor]


def copy_model(source: Path, folder: Path) -> None:
    """Copy a causal language model or a reward model as safetensors, in the dtypes of its files.

    The configs are written as save_pretrained writes them.

    Raises:
        InputError: the weights do not match the config: transformers would initialize missing ones
            at random; a file is missing or damaged, or has pickled objects other than tensors,
            which are never loaded; or the model is a classifier that cannot score responses.
    """
    config = read_model_config(source) or {}
    of_classifier = is_classifier(config)
    problem = reward_model_problem(config) if of_classifier else language_model_problem(config)
    if problem:
        raise InputError(f"the model {problem}")
    auto_class = AutoModelForSequenceClassification if of_classifier else AutoModelForCausalLM
    tensors = Tensors()
    for path in _weight_files(source):
        tensors |= _stored_tensors(path)
    model = _model_without_weights(auto_class, source, tensors)
    if of_classifier and not hasattr(model, "score"):
        raise InputError(
            f"{type(model).__name__} has no score at each position: use a classifier of a"
            " decoder-only family"
        )
    # Without weights: the configs only.
    model.save_pretrained(folder, state_dict={})
    unneeded = _unneeded(tensors, model)
    kept = {name: tensor for name, tensor in tensors.items() if name not in unneeded}
    save_torch_state_dict(_separated(kept), folder, max_shard_size=MAX_FILE_SIZE)


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


def _stored_tensors(path: Path) -> Tensors:
    """Return the tensors of a file, which is mapped into memory.

    Only files in the format of torch before 1.6 are read whole: they cannot be mapped.

    Raises:
        InputError: the file is damaged, or has pickled objects other than tensors.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except SafetensorError as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path.name} is damaged ({reason}): download it again") from None
    except pickle.UnpicklingError:
        # torch's message recommends to load them anyway.
        raise InputError(
            f"{path.name} is damaged or has pickled objects other than tensors: download it again,"
            " or use a repository with safetensors"
        ) from None
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _model_without_weights(auto_class: Any, source: Path, tensors: Tensors) -> PreTrainedModel:
    """Return a model on the meta device, and check the names and shapes of its weights.

    Args:
        tensors: the stored weights.

    Raises:
        InputError: weights are missing, or do not have the model's shape.
    """
    config = load_pretrained(AutoConfig, source)
    layers = getattr(config, "num_hidden_layers", 0)
    # A model of that many would take hours to make.
    if layers > max(len(tensors), MAX_LAYERS):
        raise InputError(
            f"config.json has num_hidden_layers: {layers}, but there are only {len(tensors)}"
            " weights: weights and config.json must belong to the same model"
        )
    # Kernels of the Hub are code that nobody has checked. Jobs choose their own implementation.
    config._attn_implementation = None
    model, loading = from_pretrained(auto_class, source, "auto", config, device_map={"": "meta"})
    check_weights(loading | {"unexpected_keys": set()})
    return model


def _unneeded(tensors: Tensors, model: PreTrainedModel) -> set[str]:
    """Return the names of tensors that the model does not have, or has under another name too.

    As in files of save_pretrained, tied weights are stored once; two that differ are both kept,
    because from_pretrained does not tie them. If transformers computes weights from several
    tensors, all tensors are kept.
    """
    renamed = names_in_model(model, tensors)
    if renamed is None:
        return set()
    names = {new: name for name, new in renamed.items()}
    repeated = {
        names[tied]
        for tied, source in model.all_tied_weights_keys.items()
        if tied in names
        and source in names
        and torch.equal(tensors[names[tied]], tensors[names[source]])
    }
    return tensors.keys() - renamed.keys() | repeated


def _separated(tensors: Tensors) -> Tensors:
    """Return tensors of which none is a view of another's memory.

    huggingface_hub rejects such views, and drops all but one of those that are the same.
    """
    separated, used = Tensors(), set[int]()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage()
        is_own = memory.nbytes() == tensor.nbytes and memory.data_ptr() not in used
        separated[name] = tensor if is_own else tensor.clone()
        used.add(memory.data_ptr())
    return separated
