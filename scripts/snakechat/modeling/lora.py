"""LoRA (Hu et al. 2021) by peft: add adapters to a model, merge them and save them.

The model stays a transformers model whose linear layers are replaced by adapters.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from snakechat.config.settings import LoraSettings
from snakechat.modeling.models import Gather, Master, describe, no_gather
from snakechat.workflow.errors import InputError
from snakechat.workflow.processes import rank

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer


def select_trained(model: PreTrainedModel, settings: LoraSettings) -> PreTrainedModel:
    """Add the adapters of a recipe, or freeze the weights that it does not train.

    Raises InputError if the recipe names layers or weights that the model has not.
    """
    if rank := settings.lora_rank:
        targets = settings.lora_target_modules
        return add_lora(model, rank, settings.lora_alpha, settings.train_base, targets)
    if settings.train_only is None:
        return model
    names, pattern = [name for name, _ in model.named_parameters()], settings.train_only
    if not any(re.search(pattern, name) for name in names):
        raise InputError(
            f"train_only: no weight of {describe(model)} matches {pattern!r}; it has"
            f" {', '.join(names[:2])}, ..., {names[-1]}"
        )
    for name, weight in model.named_parameters():
        # A new score head has no values that training could keep.
        weight.requires_grad_(name == "score.weight" or re.search(pattern, name) is not None)
    return model


def add_lora(
    model: PreTrainedModel,
    rank: int,
    alpha: float,
    train_base: str = "none",
    target_modules: Sequence[str] | str | None = None,
) -> PreTrainedModel:
    """Add adapters to linear layers of the transformer blocks, and return the model.

    Only the adapters and a score head (if any) are trained. The experts of a mixture get no
    adapters: they are not linear layers. Raises InputError if no layer is left, or peft does not
    support one.

    train_base: "embeddings_and_norms" also trains the biases of these layers, and all other
    weights; "none" trains nothing else.
    target_modules: The layers that get adapters: the last parts of their names, or a regular
    expression that matches whole names. Defaults to all.
    """
    # It takes .3 s, in which a training without adapters can start.
    from peft import LoraConfig, inject_adapter_in_model

    # Not those outside of the blocks, such as the output layer and a score head.
    lists = [name for name, each in model.named_modules() if isinstance(each, nn.ModuleList)]
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and name.startswith(tuple(f"{n}." for n in lists))
    }
    matrices = {id(layer.weight) for layer in layers.values()}
    config = LoraConfig(
        r=rank,
        # peft scales adapters by any number, and declares an int.
        lora_alpha=cast(int, alpha),
        target_modules=_adapted_names(layers, target_modules),
        # GPT-2's Conv1D is a linear layer whose weight is transposed.
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),
    )
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{describe(model)}: {reason}: set lora_rank: 0") from None
    if train_base == "embeddings_and_norms":
        for weight in model.parameters():
            weight.requires_grad_(id(weight) not in matrices)
    if hasattr(model, "score"):
        model.score.requires_grad_()
    return model


def _adapted_names(names: Iterable[str], targets: Sequence[str] | str | None) -> list[str]:
    """Return the names of the layers that get adapters, or ends of these names."""
    ends = {name.rpartition(".")[2] for name in names}
    if isinstance(targets, str):
        chosen = [name for name in names if re.fullmatch(targets, name)]
        missing = [] if chosen else [targets]
    else:
        chosen = list(ends if targets is None else targets)
        missing = sorted(set(chosen) - ends)
    if missing:
        raise InputError(
            f"lora_target_modules: {', '.join(missing)}: the linear layers of the blocks are"
            f" {', '.join(sorted(ends))}; a whole name is {next(iter(names), '')}"
        )
    return chosen


@contextlib.contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Context in which the model computes what it did before adapters were added."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    yield
    for layer in layers:
        layer.enable_adapters(True)


@contextlib.contextmanager
def merged_adapters(model: nn.Module) -> Iterator[None]:
    """Context in which the weights of layers have their adapters merged, in the model's dtype.

    Addresses stay. A copy of the weights on the CPU, made once, restores them bit for bit.
    """
    layers = cast(Any, adapted_layers(model).values())
    for layer in layers:
        weight = layer.base_layer.weight
        if not hasattr(layer, "unmerged_weight"):
            copy = weight.detach().cpu()
            layer.unmerged_weight = copy.pin_memory() if weight.is_cuda else copy.clone()
        weight.data.copy_(merge(layer))
    try:
        with disable_adapters(model):
            yield
    finally:
        for layer in layers:
            layer.base_layer.weight.data.copy_(layer.unmerged_weight, non_blocking=True)


def adapted_layers(model: nn.Module) -> dict[str, "LoraLayer"]:
    """Return the layers that have adapters, by the names that their weights have without."""
    return {
        f"{name}.weight": cast("LoraLayer", layer)
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A")
    }


def adapter_weights(layer: "LoraLayer") -> list[Tensor]:
    """Return the two matrices of the adapter of a layer."""
    modules: Any = layer.lora_A["default"], layer.lora_B["default"]
    return [module.weight for module in modules]


def merge(layer: "LoraLayer", master: Master | None = None) -> Tensor:
    """Return the sum of a layer's weight and its adapter, in the dtype of the weight.

    The sum is computed in fp32 and rounded once; with master, it stays in fp32. In 16 bits, this
    discards updates smaller than half of the distance between two numbers.
    """
    base: Any = layer.base_layer
    lora_a, lora_b = map(master or as_fp32, adapter_weights(layer))
    merged = lora_b @ lora_a
    merged *= layer.scaling["default"]
    if isinstance(base, Conv1D):
        merged = merged.T
    # Without a copy of the weight in fp32.
    merged += master(base.weight) if master else base.weight.detach()
    return merged if master else merged.to(base.weight.dtype)


def as_fp32(weight: Tensor) -> Tensor:
    """Return the value of a weight in fp32, without gradient."""
    return weight.detach().float()


def save_adapter(
    model: PreTrainedModel, folder: Path, gather: Gather = no_gather, master: Master | None = None
) -> None:
    """Save the trained weights in peft's format; only the first process writes.

    Writes nothing if weights other than adapters and a score head are trained, which the format
    does not represent.
    """
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    has_head = hasattr(model, "score")
    if not all(".lora_" in name or (has_head and name == "score.weight") for name in trained):
        return
    with gather(list(trained.values())):
        values = {name: (master or torch.Tensor.detach)(weight) for name, weight in trained.items()}
        if rank() > 0:
            return
        config: Any = model.peft_config["default"]
        config.task_type = "SEQ_CLS" if has_head else "CAUSAL_LM"
        config.modules_to_save = ["score"] if has_head else None
        config.base_model_name_or_path = model.config.name_or_path
        config.inference_mode = True
        # peft would write the set in an arbitrary order.
        config.target_modules = sorted(config.target_modules)
        config.save_pretrained(folder)
        weights = {
            f"base_model.model.{name.replace('.default.', '.')}": weight.cpu().contiguous()
            for name, weight in values.items()
        }
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
