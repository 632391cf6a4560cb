"""Weights that stay in their files until a process reads its share of them.

A model with deferred weights has the shapes and dtypes of a loaded one, and almost no memory: each
weight is one number that is expanded to the shape of the weight. ZeRO 3 replaces each weight by the
partition of the process, which reads no other part of the files.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft.utils.integrations import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from snakechat.workflow.errors import InputError

# The attribute of a deferred weight that says where its values are.
STORED = "stored_weight"


class StoredWeight(NamedTuple):
    """A weight in a safetensors file."""

    path: Path
    name: str

    def copy_to(self, target: torch.Tensor, start: int = 0) -> None:
        """Copy elements from `start` on to a flat tensor, in its dtype.

        The file is mapped into memory: only the pages of these elements are read.
        """
        with safe_open(self.path, "pt") as file:
            values = file.get_tensor(self.name).view(-1)
            target.copy_(values[start : start + len(target)])


def take_stored_weight(weight: nn.Parameter) -> StoredWeight | None:
    """Return where the values of a deferred weight are, once; None if it has its values."""
    return vars(weight).pop(STORED, None)


def defer_weights(model: PreTrainedModel, auto_class: Any, folder: Path) -> bool:
    """Give a model on the meta device its buffers and deferred weights.

    Weights that no file has are initialized as from_pretrained does it.

    Returns:
        Whether the model can be deferred; False, and the model remains as it is, if its files are
        not safetensors or if transformers computes weights from several stored ones.
    """
    names = stored_names(model, folder)
    if names is None:
        return False
    with init_empty_weights(include_buffers=False):
        buffers = dict(auto_class.from_config(model.config, dtype=model.dtype).named_buffers())
    for name, buffer in buffers.items():
        module, _, key = name.rpartition(".")
        model.get_submodule(module)._buffers[key] = buffer
        if name in names:
            names[name].copy_to(buffer.view(-1))
    deferred: dict[nn.Parameter, nn.Parameter] = {}
    # Tied weights are one parameter with several names. Only one of them may be in the files.
    parameters = list(model.named_parameters(remove_duplicate=False))
    stored = {weight: names[name] for name, weight in parameters if name in names}
    for name, weight in parameters:
        module_name, _, key = name.rpartition(".")
        module = model.get_submodule(module_name)
        if weight not in deferred:
            values = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            if weight not in stored:
                values = torch.empty(weight.shape, dtype=weight.dtype)
            deferred[weight] = nn.Parameter(values)
            if weight in stored:
                setattr(deferred[weight], STORED, stored[weight])
        module._parameters[key] = deferred[weight]
        if weight not in stored:
            model._init_weights(module)
    return True


def stored_names(model: PreTrainedModel, folder: Path) -> dict[str, StoredWeight] | None:
    """Return where the weights of a model are, by their names in the model.

    Returns None if the files are not safetensors, or if transformers computes weights of the model
    from several stored ones.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    found = {}
    for name, path in weight_files(folder).items():
        # As transformers' convert_and_load_state_dict_in_model finds them.
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = rename_source_key(name, [], [], prefix, state)
        if pattern is not None:
            return None
        if renamed in state:
            found[renamed] = StoredWeight(path, name)
    return found or None


def weight_files(folder: Path) -> Mapping[str, Path]:
    """Return the safetensors file of each weight of a folder; empty without safetensors.

    Raises:
        InputError: the index or a file is damaged.
    """
    index, single = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    try:
        if single.exists():
            with safe_open(single, "pt") as file:
                return dict.fromkeys(file.keys(), single)
        if index.exists():
            names = json.loads(index.read_text())["weight_map"]
            return {name: folder / file for name, file in names.items()}
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise InputError(f"{folder}: damaged weights: {str(error).splitlines()[0]}") from None
    return {}


def count_stored_weights(folder: Path) -> int:
    """Return the number of weights in the safetensors files of a folder; 0 without such files."""
    count = 0
    for path in set(weight_files(folder).values()):
        with safe_open(path, "pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
            count += sum(map(math.prod, shapes))
    return count
