"""Models: make new ones, and what a model can do."""

import contextlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from snakechat.data.model_files import layers_problem
from snakechat.workflow.errors import InputError

# Progress bars for single files, and reports on score heads that are new on purpose.
transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()
# Between peft and transformers: users cannot act on it.
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
# transformers imports DeepSpeed if it is installed, which warns if it finds no accelerator.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# ZeRO 3 partitions the weights of a model over the processes.

# Returns a context in which every process has the whole of some weights. All processes must enter
# it with the same weights.
Gather = Callable[[Sequence[torch.Tensor]], AbstractContextManager[Any]]
# For weights that every process has.
no_gather: Gather = contextlib.nullcontext

# Returns the whole fp32 value of a weight in training. All processes must call it with the same
# weight.
Master = Callable[[torch.Tensor], torch.Tensor]

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def make_causal(
    init: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """Create a causal language model with random weights.

    init: keys of the model's transformers config. Raises InputError if transformers rejects them.
    """
    ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
    torch.manual_seed(seed)
    for name in init:
        if "attn_implementation" in name:
            raise InputError(f"init: {name}: set attn_implementation in the placement instead")
    if problem := layers_problem(init):
        raise InputError(f"init: {problem}")
    try:
        config = AutoConfig.for_model(**init, vocab_size=len(tokenizer), **ids)
        return AutoModelForCausalLM.from_config(config)
    except Exception as error:
        # Keys of init that do not fit together end in any exception of transformers or torch.
        message = " ".join(str(error).split())
        raise InputError(f"init {init}: {type(error).__name__}: {message}") from None


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Have the backward passes of a model compute the activations of its layers again."""
    # transformers 5.17 has the old name alone.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def describe(model: PreTrainedModel) -> str:
    """Return the folder and the type of a model."""
    return f"{model.config.name_or_path or 'the model'}: model_type {model.config.model_type}"


def check_sequence_length(model: PreTrainedModel, longest: int) -> None:
    """Raise InputError if the longest sequence of a recipe exceeds the model's positions."""
    positions = max_positions(model)
    if positions and longest > positions:
        is_longrope = positions < getattr(model.config, "max_position_embeddings", positions)
        reason = " before rope_type longrope changes their angles" if is_longrope else ""
        raise InputError(
            f"{model.config.name_or_path}: sequences of up to {longest} tokens exceed the model's"
            f" {positions} positions{reason}: reduce the recipe's max_length (rlhf:"
            " max_prompt_length, max_response_length), or name another model"
        )


def max_positions(model: PreTrainedModel) -> int | None:
    """Return the number of tokens of the longest sequence, or None without a limit.

    With longrope, the angles of all positions depend on the longest sequence of a batch if it
    exceeds the original length: log-probabilities would depend on the batch of a row.
    """
    limits = [getattr(model.config, "max_position_embeddings", None)]
    rope = getattr(model.config, "rope_parameters", None) or {}
    # One for all layers, or one for each type of layers.
    for parameters in (rope, *rope.values()):
        if isinstance(parameters, Mapping) and parameters.get("rope_type") == "longrope":
            limits.append(parameters["original_max_position_embeddings"])
    return min((limit for limit in limits if limit), default=None)


def model_size(model: PreTrainedModel) -> dict[str, int]:
    """Return the numbers of weights and trained weights, and what attention FLOPs depend on.

    The keys are the same as in run.json.
    """
    sizes = [(whole_shape(weight).numel(), weight.requires_grad) for weight in model.parameters()]
    return {
        "weights": sum(size for size, _ in sizes),
        "trained": sum(size for size, trained in sizes if trained),
        "layers": model.config.num_hidden_layers,
        "hidden_size": model.config.hidden_size,
    }


def supports_packing(model: PreTrainedModel) -> bool:
    """Return whether a sequence may pack several rows, separated by a boolean mask.

    The model is then called with use_cache=False, position_ids and a mask [B, 1, T, T], True where
    a token attends to another. A given mask replaces the mask of a sliding window. Eager attention
    would add the mask as numbers. Whether a model with SDPA uses mask and positions is measured
    (snakechat/modeling/model_check.py).
    """
    return model.config._attn_implementation == "sdpa"


def whole_shape(weight: torch.Tensor) -> torch.Size:
    """Return the shape of a weight, partitioned or not."""
    # DeepSpeed's attribute of a partitioned one.
    return getattr(weight, "ds_shape", weight.shape)
