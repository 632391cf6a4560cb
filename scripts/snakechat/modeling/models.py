"""Models: create, load, check and save them, and choose their device."""

import math
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from snakechat.data.model_files import (
    is_classifier,
    language_model_problem,
    read_model_config,
    reward_model_problem,
)
from snakechat.data.special_tokens import end_of_turn_id, stop_ids
from snakechat.modeling.lora import save_adapter, save_merged
from snakechat.workflow.distributed import rank
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

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Settings that transform logits after the output layer. Our forward passes compute logits as hidden
# states times weights.
LOGIT_SETTINGS = (
    "final_logit_softcapping",
    "lm_head_multiplier",
    "logit_scale",
    "logit_softcapping",
    "logits_scaling",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "output_multiplier",
)

# Families that accept a boolean attention mask [B, 1, T, T] and position_ids. BLOOM does not: it
# derives positions from the columns.
PACKING_FAMILIES = {
    "gemma",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
}

# Families of these whose sliding window, if any, applies to all layers. The others take a mask for
# each of config.layer_types.
SINGLE_WINDOW_FAMILIES = {"mistral", "phi3"}


def choose_device(placement: Mapping[str, Any]) -> torch.device:
    """Return the device of a placement.

    Raises:
        InputError: it requires a GPU, and torch finds none.
    """
    if placement["gpus_per_node"] == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("placement requires a GPU, but torch finds none: set gpus_per_node: 0")
    return torch.device("cuda")


def make_causal(
    init: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """Create a causal language model with random weights.

    Args:
        init: keys of the model's transformers config.

    Raises:
        InputError: transformers rejects `init`.
    """
    ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
    torch.manual_seed(seed)
    try:
        config = AutoConfig.for_model(**init, vocab_size=len(tokenizer), **ids)
        return AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError) as error:
        raise InputError(f"init {init}: {str(error).splitlines()[0]}") from None


def copy_model(source: str | Path, folder: Path) -> None:
    """Copy a causal language model or a reward model as safetensors, in its own dtype.

    Raises:
        InputError: weights are missing, which transformers would initialize at random, the file has
            pickled objects other than tensors, which are never loaded, or the model is a classifier
            that cannot score responses.
    """
    config = read_model_config(Path(source))
    auto_class: Any = AutoModelForCausalLM
    if config and is_classifier(config):
        problem = reward_model_problem(config)
        if problem:
            raise InputError(f"the model {problem}")
        auto_class = AutoModelForSequenceClassification
    try:
        loaded: Any = auto_class.from_pretrained(
            source, dtype="auto", local_files_only=True, output_loading_info=True
        )
    except pickle.UnpicklingError:
        # torch's message recommends to load them anyway.
        raise InputError(
            "the weights file is damaged or has pickled objects other than tensors: use a"
            " repository with safetensors"
        ) from None
    model, loading = loaded
    if loading["missing_keys"]:
        raise InputError(f"weights are missing: {', '.join(sorted(loading['missing_keys']))}")
    if auto_class is AutoModelForSequenceClassification and not hasattr(model, "score"):
        raise InputError(
            f"{type(model).__name__} has no score at each position: use a classifier of a"
            " decoder-only family"
        )
    model.save_pretrained(folder)


def _check_kind(
    folder: str | Path, find_problem: Callable[[Mapping[str, Any]], str | None]
) -> None:
    """Raise InputError if the model of a folder is not of the kind that is needed."""
    config = read_model_config(Path(folder))
    problem = find_problem(config) if config else None
    if problem:
        raise InputError(f"{folder} {problem}")


def load_causal(
    folder: str | Path, dtype: str, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Load a causal language model whose generation_config has all ids that end a response.

    Raises:
        InputError: the model is not supported, or its weights do not match its config.
    """
    config = _load_config(folder, tokenizer)
    _check_kind(folder, language_model_problem)
    model = _load(AutoModelForCausalLM, folder, dtype, config)
    generation: Any = model.generation_config
    generation.eos_token_id = list(stop_ids(tokenizer, folder))
    return model


def load_scorer(
    folder: str | Path, dtype: str, tokenizer: PreTrainedTokenizerBase, new_head: bool = False
) -> PreTrainedModel:
    """Load a model with one score per position: a reward model or a critic.

    Args:
        new_head: the folder has a language model, which gets a new head with standard deviation
            1 / sqrt(d + 1) (Stiennon et al. 2020, appendix). Otherwise the folder must have a head:
            transformers would initialize a random one.

    Raises:
        InputError: the model is not supported, or its weights do not match its config.
    """
    config = _load_config(folder, tokenizer, num_labels=1)
    _check_kind(folder, language_model_problem if new_head else reward_model_problem)
    model = _load(AutoModelForSequenceClassification, folder, dtype, config, new_head)
    if new_head:
        head: Any = model.score
        nn.init.normal_(head.weight, std=1 / math.sqrt(head.in_features + 1))
    return model


def _load_config(
    folder: str | Path, tokenizer: PreTrainedTokenizerBase, **changes: Any
) -> PreTrainedConfig:
    """Return the config of a folder with the tokenizer's ids and without dropout.

    Raises:
        InputError: the model is not supported. This is checked before its weights are read.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.is_encoder_decoder:
        raise InputError(f"{folder}: {config.model_type} has an encoder: use a decoder-only model")
    for name in LOGIT_SETTINGS:
        value = getattr(config, name, None)
        if value not in (None, 1):
            raise InputError(
                f"{folder}: config.json: {name} is {value}: models that transform logits after the"
                " output layer are not supported: use another model"
            )
    if len(tokenizer) > config.vocab_size:
        raise InputError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, but the model has only"
            f" {config.vocab_size} embeddings: use the model's own tokenizer"
        )
    # Without dropout PPO's first ratio is exactly 1, and runs are reproducible.
    dropouts = {name: 0.0 for name, value in config.to_dict().items() if "drop" in name and value}
    changes |= dropouts | {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
    for name, value in changes.items():
        setattr(config, name, value)
    # transformers then selects sdpa if the family has it. Eager attention would add a boolean mask
    # to the attention scores as numbers.
    config._attn_implementation = None
    return config


def _load(
    auto_class: Any,
    folder: str | Path,
    dtype: str,
    config: PreTrainedConfig,
    new_head: bool = False,
) -> PreTrainedModel:
    """Load a model, and check that its weights are exactly those of its config.

    Args:
        new_head: the weight of the score head may be missing.
    """
    try:
        model, loading = auto_class.from_pretrained(
            folder,
            config=config,
            dtype=DTYPES[dtype],
            local_files_only=True,
            output_loading_info=True,
            # They are rejected below by name, which transformers' error does not have.
            ignore_mismatched_sizes=True,
        )
    except ValueError as error:
        raise InputError(f"{folder}: {str(error).splitlines()[0]}") from None
    missing, unexpected = loading["missing_keys"], loading["unexpected_keys"]
    if new_head:
        missing -= {"score.weight"}
        # The output layer is not used.
        unexpected = {name for name in unexpected if name.startswith(f"{model.base_model_prefix}.")}
    mismatches = {
        "are missing": missing,
        "are not in the model": unexpected,
        "do not have the model's shape": {name for name, *_ in loading["mismatched_keys"]},
    }
    for problem, names in mismatches.items():
        if names:
            raise InputError(
                f"{folder}: weights {problem}: {', '.join(sorted(names))}:"
                " weights and config.json must belong to the same model"
            )
    return model


def check_sequence_length(model: PreTrainedModel, longest: int) -> None:
    """Check that the model has positions for the longest sequence of a recipe.

    Raises:
        InputError: it has fewer.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions and longest > positions:
        raise InputError(
            f"{model.config.name_or_path}: sequences of up to {longest} tokens exceed the model's"
            f" {positions} positions: reduce the recipe's max_length (rlhf: max_prompt_length,"
            " max_response_length)"
        )


def model_size(model: PreTrainedModel) -> dict[str, int]:
    """Return the numbers of weights and trained weights, and what attention FLOPs depend on.

    Must run before ZeRO 3 partitions the weights. The keys are those of NAME.run.json.
    """
    weights = list(model.parameters())
    return {
        "weights": sum(weight.numel() for weight in weights),
        "trained": sum(weight.numel() for weight in weights if weight.requires_grad),
        "layers": model.config.num_hidden_layers,
        "hidden_size": model.config.hidden_size,
    }


def supports_packing(model: PreTrainedModel) -> bool:
    """Return whether a sequence may pack several rows, separated by a boolean mask.

    The model is then called with use_cache=False, position_ids and a mask [B, 1, T, T], True where
    a token attends to another. A given mask replaces that of a sliding window.
    """
    return (
        model.config.model_type in PACKING_FAMILIES and model.config._attn_implementation == "sdpa"
    )


def _stop_ids_to_save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> int | list[int]:
    """Return the ids that end a response, for generation_config.json: the model's and others."""
    generation: Any = model.generation_config
    loaded = generation.eos_token_id
    ids = [end_of_turn_id(tokenizer), tokenizer.eos_token_id]
    ids += loaded if isinstance(loaded, list) else [] if loaded is None else [loaded]
    ids = list(dict.fromkeys(ids))
    return ids if len(ids) > 1 else ids[0]


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a folder that from_pretrained loads: safetensors, config, tokenizer.

    Adapters are merged, in the model's dtype. The subfolder adapter also has them separately, if
    nothing else but a score head was trained. Under ZeRO 3 the caller gathers the weights. Only the
    first process writes.
    """
    if rank() > 0:
        return
    if model.can_generate():
        ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
        model.generation_config = GenerationConfig(
            do_sample=True, **ids | {"eos_token_id": _stop_ids_to_save(model, tokenizer)}
        )
    if hasattr(model, "peft_config"):
        save_adapter(model, folder / "adapter")
        save_merged(model, folder)
    else:
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
