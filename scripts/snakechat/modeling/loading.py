"""Load models, and add LoRA adapters (Hu et al. 2021) to them.

A model is checked: it is what its folder says, and what recipes support. With adapters (peft) it
stays a transformers model, whose linear layers are replaced.

A model with deferred weights has the shapes and dtypes of a loaded one, and almost no memory: each
weight is one number that is expanded to the shape of the weight. ZeRO 3 replaces each weight by the
partition of the process, which reads no other part of the files.
"""

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D

from snakechat.data.chat_templates import stop_ids
from snakechat.data.model_files import load_pretrained, model_problem, read_model_config
from snakechat.modeling.models import DTYPES, SPECIAL_IDS, Master, describe
from snakechat.workflow.errors import InputError

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

# The attribute of a deferred weight with its values.
STORED = "stored_weight"


def load_causal(
    folder: str | Path, dtype: str, tokenizer: PreTrainedTokenizerBase, deferred: bool = False
) -> PreTrainedModel:
    """Load a causal language model whose generation_config has all ids that end a response.

    Raises InputError if the model is not supported, or its weights do not match its config.

    Args:
        dtype: "auto" for the dtype of its files.
        deferred: leave the weights in their files, for a model that ZeRO 3 partitions or that is
            only checked.
    """
    model = _load(AutoModelForCausalLM, folder, dtype, tokenizer, deferred)
    cast(Any, model.generation_config).eos_token_id = list(stop_ids(tokenizer, folder))
    return model


def load_scorer(
    folder: str | Path,
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    new_head: bool = False,
    deferred: bool = False,
) -> PreTrainedModel:
    """Load a model with one score per position, a reward model or a critic, as load_causal does.

    new_head: the folder has a language model, which gets a new head with standard deviation 1 /
    sqrt(d + 1) (Stiennon et al. 2020, appendix). Otherwise the folder must have a head:
    transformers would initialize a random one.
    """
    model = _load(AutoModelForSequenceClassification, folder, dtype, tokenizer, deferred, new_head)
    if new_head:
        head: Any = model.score
        torch.nn.init.normal_(head.weight, std=1 / math.sqrt(head.in_features + 1))
    return model


def _load(
    auto_class: Any,
    folder: str | Path,
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    deferred: bool,
    new_head: bool = False,
) -> PreTrainedModel:
    """Load a model with the tokenizer's ids and without the noise of training; see load_scorer."""
    is_scorer = auto_class is AutoModelForSequenceClassification
    if problem := model_problem(read_model_config(Path(folder)) or {}, is_scorer and not new_head):
        raise InputError(f"{folder} {problem}")
    config = load_pretrained(AutoConfig, folder)
    if config.is_encoder_decoder:
        raise InputError(f"{folder}: {config.model_type} has an encoder: use a decoder-only model")
    if len(tokenizer) > config.vocab_size:
        raise InputError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, but the model has only"
            f" {config.vocab_size} embeddings: use the model's own tokenizer"
        )
    values = config.to_dict().items()
    # Without noise PPO's first ratio is exactly 1, and runs are reproducible.
    config.update({name: 0.0 for name, value in values if re.search("drop|jitter", name) and value})
    config.update({name: getattr(tokenizer, name) for name in SPECIAL_IDS})
    if is_scorer:
        config.num_labels = 1
    # transformers then selects sdpa if the family has it. Eager attention would add a boolean mask
    # to the attention scores as numbers.
    config._attn_implementation = None
    # With the dtype of its files, a model stays mapped into memory. A new head is drawn later.
    with torch.random.fork_rng([], enabled=deferred):
        model, loading = from_pretrained(auto_class, folder, "auto" if deferred else dtype, config)
    if new_head:
        loading["missing_keys"] -= {"score.weight"}
        # The output layer is not used.
        prefix, unexpected = f"{model.base_model_prefix}.", loading["unexpected_keys"]
        loading["unexpected_keys"] = {name for name in unexpected if name.startswith(prefix)}
    check_weights(loading, f"{folder}: ")
    if deferred:
        defer_weights(model, auto_class, DTYPES[dtype], new_head)
    return model


def from_pretrained(
    auto_class: Any, folder: str | Path, dtype: str | torch.dtype, config: PreTrainedConfig
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model that transformers loads, and what it reports about the weights.

    dtype: "auto" takes the dtype of the first weight in the files, whichever the config names.
    """
    if dtype == "auto":
        config.dtype = None
    return load_pretrained(
        auto_class,
        folder,
        config=config,
        dtype=DTYPES.get(str(dtype), dtype),
        output_loading_info=True,
        # They are rejected by name, which transformers' error does not have.
        ignore_mismatched_sizes=True,
    )


def check_weights(loading: Mapping[str, Any], where: str = "") -> None:
    """Raise InputError if files do not have exactly the weights of a model.

    loading: What transformers reports. where: The start of the error.
    """
    mismatches = {
        "are missing": loading["missing_keys"],
        "are not in the model": loading["unexpected_keys"],
        "do not have the model's shape": {name for name, *_ in loading["mismatched_keys"]},
    }
    for problem, names in mismatches.items():
        if names:
            raise InputError(
                f"{where}weights {problem}: {', '.join(sorted(names))}:"
                " weights and config.json must belong to the same model"
            )


# --- weights that stay in their files -----------------------------------------------------------


def take_stored_weight(weight: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the values of a deferred weight, once; None if the weight has its values.

    They have the dtype of their file and are mapped into memory: only pages that are read take any.
    """
    return vars(weight).pop(STORED, None)


def defer_weights(
    model: PreTrainedModel, auto_class: Any, dtype: torch.dtype, new_head: bool
) -> None:
    """Defer the weights of a model that was loaded in the dtype of its files; see _load.

    No file has a new score head, which is initialized as from_pretrained does it.
    """
    # Models with loaded weights start without it.
    from peft.utils.integrations import init_empty_weights

    model.config.dtype, state = dtype, model.state_dict()
    with init_empty_weights(include_buffers=False):
        buffers = dict(auto_class.from_config(model.config, dtype=dtype).named_buffers())
    for name, buffer in buffers.items():
        module, _, key = name.rpartition(".")
        model.get_submodule(module)._buffers[key] = buffer
        if name in state:
            buffer.copy_(state[name])
    for weight in model.parameters():
        setattr(weight, STORED, weight.data)
        weight.data = torch.zeros((), dtype=dtype).expand(weight.shape)
    if new_head:
        head: Any = model.score
        head.weight = torch.nn.Parameter(torch.empty(head.weight.shape, dtype=dtype))
        model._init_weights(head)


# --- adapters -------------------------------------------------------------------------------------


def select_trained(model: PreTrainedModel, settings: Any) -> PreTrainedModel:
    """Add the adapters of a recipe (LoraSettings), or freeze the weights that it does not train.

    Raises InputError if the recipe names layers or weights that the model has not.
    """
    if rank := settings.lora_rank:
        return add_lora(
            model, rank, settings.lora_alpha, settings.train_base, settings.lora_target_modules
        )
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
    lists = [name for name, each in model.named_modules() if isinstance(each, torch.nn.ModuleList)]
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear | Conv1D)
        and name.startswith(tuple(f"{n}." for n in lists))
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
def disable_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Context in which the model computes what it did before adapters were added."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    yield
    for layer in layers:
        layer.enable_adapters(True)


@contextlib.contextmanager
def merged_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Context in which the weights of layers have their adapters merged, in the model's dtype.

    Addresses stay. A copy of the weights on the CPU, made once, restores them bit for bit.
    """
    layers = cast(Any, adapted_layers(model).values())
    for layer in layers:
        weight = layer.base_layer.weight
        if not hasattr(layer, "unmerged_weight"):
            copy = weight.detach().cpu()
            layer.unmerged_weight = copy.pin_memory() if weight.is_cuda else copy.clone()
        weight.data.copy_(merge_adapter(layer))
    try:
        with disable_adapters(model):
            yield
    finally:
        for layer in layers:
            layer.base_layer.weight.data.copy_(layer.unmerged_weight, non_blocking=True)


def adapted_layers(model: torch.nn.Module) -> dict[str, "LoraLayer"]:
    """Return the layers that have adapters, by the names that their weights have without."""
    return {
        f"{name}.weight": cast("LoraLayer", layer)
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A")
    }


def adapter_weights(layer: Any) -> list[torch.Tensor]:
    """Return the two matrices of the adapter of a layer (LoraLayer)."""
    return [layer.lora_A["default"].weight, layer.lora_B["default"].weight]


def merge_adapter(layer: "LoraLayer", master: Master | None = None) -> torch.Tensor:
    """Return the sum of a layer's weight and its adapter, in the dtype of the weight.

    The sum is computed in fp32 and rounded once; with master, it stays in fp32. In 16 bits, this
    discards updates smaller than half of the distance between two numbers.
    """
    base: Any = layer.base_layer
    lora_a, lora_b = (
        master(weight) if master else weight.detach().float() for weight in adapter_weights(layer)
    )
    merged = lora_b @ lora_a
    merged *= layer.scaling["default"]
    if isinstance(base, Conv1D):
        merged = merged.T
    # Without a copy of the weight in fp32.
    merged += master(base.weight) if master else base.weight.detach()
    return merged if master else merged.to(base.weight.dtype)
