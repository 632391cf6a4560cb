"""Models: their device and dtypes, new ones and copies, and what a model can do."""

import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from snakechat.data.model_files import (
    is_classifier,
    read_model_config,
    reward_model_problem,
)
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
