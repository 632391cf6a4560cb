"""Load models. A model is checked: it is what its folder says, and what recipes support.

A model with deferred weights has the shapes and dtypes of a loaded one, and almost no memory: each
weight is one number that is expanded to the shape of the weight. ZeRO 3 replaces each weight by the
partition of the process, which reads no other part of the files.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from snakechat.data.chat_templates import stop_ids
from snakechat.data.model_files import load_pretrained, model_problem, read_model_config
from snakechat.modeling.models import DTYPES, SPECIAL_IDS
from snakechat.workflow.errors import InputError

# The attribute of a deferred weight with its values.
STORED = "stored_weight"


def load_causal(
    folder: str | Path, dtype: str, tokenizer: PreTrainedTokenizerBase, deferred: bool = False
) -> PreTrainedModel:
    """Load a causal language model whose generation_config has all ids that end a response.

    Raises InputError if the model is not supported, or its weights do not match its config.

    Args:
        dtype: "auto" for the dtype of its files.
        deferred: leave the weights in their files, for a model that ZeRO 3 partitions.
    """
    model = _load(AutoModelForCausalLM, folder, dtype, tokenizer, deferred)
    generation: Any = model.generation_config
    generation.eos_token_id = list(stop_ids(tokenizer, folder))
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
    auto_class = AutoModelForSequenceClassification
    model = _load(auto_class, folder, dtype, tokenizer, deferred, new_head)
    if new_head:
        head: Any = model.score
        nn.init.normal_(head.weight, std=1 / math.sqrt(head.in_features + 1))
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
    for name, value in config.to_dict().items():
        # Without noise PPO's first ratio is exactly 1, and runs are reproducible.
        if re.search("drop|jitter", name) and value:
            setattr(config, name, 0.0)
    for name in SPECIAL_IDS:
        setattr(config, name, getattr(tokenizer, name))
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


def take_stored_weight(weight: nn.Parameter) -> torch.Tensor | None:
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
    # ZeRO 3 alone needs it.
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
        head.weight = nn.Parameter(torch.empty(head.weight.shape, dtype=dtype))
        model._init_weights(head)
