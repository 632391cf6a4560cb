"""Load models, and check that they are what their folder says and what recipes support."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from snakechat.data.model_files import (
    language_model_problem,
    load_pretrained,
    read_model_config,
    reward_model_problem,
)
from snakechat.data.special_tokens import stop_ids
from snakechat.modeling.deferred_weights import defer_weights
from snakechat.modeling.models import DTYPES, SPECIAL_IDS
from snakechat.workflow.errors import InputError, warn


def load_causal(
    folder: str | Path, dtype: str, tokenizer: PreTrainedTokenizerBase, deferred: bool = False
) -> PreTrainedModel:
    """Load a causal language model whose generation_config has all ids that end a response.

    Args:
        deferred: leave the weights in their files, for a model that ZeRO 3 partitions
            (snakechat/modeling/deferred_weights.py).

    Raises:
        InputError: the model is not supported, or its weights do not match its config.
    """
    _check_kind(folder, language_model_problem)
    config = _load_config(folder, tokenizer)
    model = _load(AutoModelForCausalLM, folder, dtype, config, deferred)
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
    """Load a model with one score per position: a reward model or a critic.

    Args:
        new_head: the folder has a language model, which gets a new head with standard deviation
            1 / sqrt(d + 1) (Stiennon et al. 2020, appendix). Otherwise the folder must have a head:
            transformers would initialize a random one.
        deferred: as for load_causal.

    Raises:
        InputError: the model is not supported, or its weights do not match its config.
    """
    _check_kind(folder, language_model_problem if new_head else reward_model_problem)
    config = _load_config(folder, tokenizer, num_labels=1)
    model = _load(AutoModelForSequenceClassification, folder, dtype, config, deferred, new_head)
    if new_head:
        head: Any = model.score
        nn.init.normal_(head.weight, std=1 / math.sqrt(head.in_features + 1))
    return model


def check_loadable(folder: Path, tokenizer: PreTrainedTokenizerBase, is_classifier: bool) -> None:
    """Check that load_causal, or load_scorer of a classifier, loads a model, without its weights.

    Raises:
        InputError: the model is of another kind, or its weights do not match its config.
    """
    _check_kind(folder, reward_model_problem if is_classifier else language_model_problem)
    config = _load_config(folder, tokenizer, **({"num_labels": 1} if is_classifier else {}))
    auto_class = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    _, found = from_pretrained(auto_class, folder, "fp32", config, device_map={"": "meta"})
    missing, unexpected = found["missing_keys"], found["unexpected_keys"]
    check_weights(missing, unexpected, found["mismatched_keys"], f"{folder}: ")


def _check_kind(
    folder: str | Path, find_problem: Callable[[Mapping[str, Any]], str | None]
) -> None:
    """Raise InputError if the model of a folder is not of the kind that is needed."""
    config = read_model_config(Path(folder))
    problem = find_problem(config) if config else None
    if problem:
        raise InputError(f"{folder} {problem}")


def _load_config(
    folder: str | Path, tokenizer: PreTrainedTokenizerBase, **changes: Any
) -> PreTrainedConfig:
    """Return the config of a folder with the tokenizer's ids and without the noise of training.

    Raises:
        InputError: the model is not supported. This is checked before its weights are read.
    """
    config = load_pretrained(AutoConfig, folder)
    if config.is_encoder_decoder:
        raise InputError(f"{folder}: {config.model_type} has an encoder: use a decoder-only model")
    if len(tokenizer) > config.vocab_size:
        raise InputError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, but the model has only"
            f" {config.vocab_size} embeddings: use the model's own tokenizer"
        )
    # Without noise PPO's first ratio is exactly 1, and runs are reproducible.
    noise = {
        name: 0.0
        for name, value in config.to_dict().items()
        if re.search("drop|jitter", name) and value
    }
    changes |= noise | {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
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
    deferred: bool,
    new_head: bool = False,
) -> PreTrainedModel:
    """Load a model, and check that its weights are exactly those of its config.

    Args:
        new_head: the weight of the score head may be missing.
    """

    def load(**arguments: Any) -> PreTrainedModel:
        model, loading = from_pretrained(auto_class, folder, dtype, config, **arguments)
        missing, unexpected = loading["missing_keys"], loading["unexpected_keys"]
        if new_head:
            missing -= {"score.weight"}
            # The output layer is not used.
            prefix = f"{model.base_model_prefix}."
            unexpected = {name for name in unexpected if name.startswith(prefix)}
        check_weights(missing, unexpected, loading["mismatched_keys"], f"{folder}: ")
        return model

    if deferred:
        model = load(device_map={"": "meta"})
        if defer_weights(model, auto_class, config, Path(folder)):
            return model
        warn(f"{folder}: the weights cannot be read in parts: each process loads them all")
    return load()


def from_pretrained(
    auto_class: Any, folder: str | Path, dtype: str, config: PreTrainedConfig, **arguments: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model that transformers loads, and what it reports about the weights."""
    return load_pretrained(
        auto_class,
        folder,
        config=config,
        # auto: that of the files.
        dtype=DTYPES.get(dtype, dtype),
        output_loading_info=True,
        # They are rejected by name, which transformers' error does not have.
        ignore_mismatched_sizes=True,
        **arguments,
    )


def check_weights(
    missing: set[str], unexpected: set[str], mismatched: Iterable[tuple[str, ...]], where: str = ""
) -> None:
    """Raise InputError if weights in files are not exactly those of a model.

    Args:
        missing, unexpected, mismatched: What transformers reports; mismatched ones have other
            shapes.
        where: The start of the error.
    """
    mismatches = {
        "are missing": missing,
        "are not in the model": unexpected,
        "do not have the model's shape": {name for name, *_ in mismatched},
    }
    for problem, names in mismatches.items():
        if names:
            raise InputError(
                f"{where}weights {problem}: {', '.join(sorted(names))}:"
                " weights and config.json must belong to the same model"
            )
