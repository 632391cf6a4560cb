"""Models: making, loading and saving them, and the device that they are on."""

import math
import os
import pickle
import warnings

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
)

from snakechat.modeling.lora import merged_weights, save_adapter
from snakechat.workflow.distributed import rank
from snakechat.workflow.errors import InputError

# Progress bars of single files and reports on heads that are meant to be new say nothing here.
transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()
# Between peft and transformers: nothing that a user could change.
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
# transformers imports DeepSpeed when it is installed, which warns where it finds no accelerator.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Where these are set, logits are not hidden states times weights, as our passes make them.
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

# Families of which a row can hold several sequences, told apart by a mask [1, 1, T, T] of booleans
# and position_ids. BLOOM cannot: its positions follow from the columns.
MASKED_FAMILIES = {
    "gemma",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "opt",
    "qwen2",
    "qwen3",
}


def choose_device(placement):
    """The device of a placement. Raises InputError where it asks for a GPU and there is none."""
    if placement["gpus_per_node"] == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("placement asks for a GPU and torch finds none: set gpus_per_node: 0")
    return torch.device("cuda")


def make_causal(init, tokenizer, seed):
    """A causal language model with random weights, for a tokenizer.

    init: keys of the model's transformers config. Raises InputError where they make no model.
    """
    ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
    torch.manual_seed(seed)
    try:
        config = AutoConfig.for_model(**init, vocab_size=len(tokenizer), **ids)
        return AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError) as error:
        raise InputError(f"init {init}: {str(error).splitlines()[0]}") from None


def copy_causal(source, folder):
    """Copy a causal language model as safetensors, in the numbers it has.

    Raises InputError where weights are missing, which transformers would make up at random, or
    where their file holds more than tensors: pickled objects are never made.
    """
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            source, dtype="auto", local_files_only=True, output_loading_info=True
        )
    except pickle.UnpicklingError:
        # torch's own message advises to load them all the same.
        raise InputError("weights that are more than tensors, or damaged: not loaded") from None
    if loading["missing_keys"]:
        raise InputError(f"weights are missing: {', '.join(sorted(loading['missing_keys']))}")
    model.save_pretrained(folder)


def load_causal(folder, dtype, tokenizer):
    """The causal language model of a folder. Raises InputError where it cannot work."""
    return _load(AutoModelForCausalLM, folder, dtype, _config(folder, tokenizer))


def load_scorer(folder, dtype, tokenizer, new_head=False):
    """A model with one score for each position: a reward model, or a critic.

    new_head: the folder has a language model; the head starts with deviation 1 / sqrt(d + 1)
    (Stiennon et al. 2020, appendix). Otherwise the folder must have the head: transformers would
    make up a random one. Raises InputError where it cannot work.
    """
    config = _config(folder, tokenizer, num_labels=1)
    model = _load(AutoModelForSequenceClassification, folder, dtype, config, new_head)
    if new_head:
        nn.init.normal_(model.score.weight, std=1 / math.sqrt(model.score.in_features + 1))
    return model


def _config(folder, tokenizer, **changes):
    """The config of a folder: with the tokenizer's ids, without dropout.

    Raises InputError where the model cannot work, before its weights are read.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.is_encoder_decoder:
        raise InputError(f"{folder}: {config.model_type} has an encoder: take a decoder-only model")
    for name in LOGIT_SETTINGS:
        value = getattr(config, name, None)
        if value not in (None, 1):
            raise InputError(
                f"{folder}: config.json: {name} is {value}: logits that are changed after the"
                " output layer are not supported: take another model"
            )
    if len(tokenizer) > config.vocab_size:
        raise InputError(
            f"{folder}: {len(tokenizer)} tokens, but {config.vocab_size} embeddings:"
            " take the tokenizer that belongs to the model"
        )
    # Dropout is off in every phase: PPO's first ratio is then exactly 1, and a run can be repeated.
    dropouts = {name: 0.0 for name, value in config.to_dict().items() if "drop" in name and value}
    changes |= dropouts | {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
    for name, value in changes.items():
        setattr(config, name, value)
    # sdpa where the family has it: eager takes a mask of booleans for numbers.
    config._attn_implementation = None
    return config


def _load(auto_class, folder, dtype, config, new_head=False):
    """A model whose weights are exactly those that its config asks for, but for a new head."""
    try:
        model, loading = auto_class.from_pretrained(
            folder,
            config=config,
            dtype=DTYPES[dtype],
            local_files_only=True,
            output_loading_info=True,
            # They are refused below, by name, which transformers' own error does not tell.
            ignore_mismatched_sizes=True,
        )
    except ValueError as error:
        raise InputError(f"{folder}: {str(error).splitlines()[0]}") from None
    missing, unexpected = loading["missing_keys"], loading["unexpected_keys"]
    if new_head:
        missing -= {"score.weight"}
        # The output layer stays behind.
        unexpected = {name for name in unexpected if name.startswith(f"{model.base_model_prefix}.")}
    misfits = {
        "are missing": missing,
        "are not in the model": unexpected,
        "have not the shape of the model": {name for name, *_ in loading["mismatched_keys"]},
    }
    for what, names in misfits.items():
        if names:
            raise InputError(
                f"{folder}: weights {what}: {', '.join(sorted(names))}:"
                " weights and config.json must belong together"
            )
    return model


def check_sequence_length(model, longest):
    """Raises InputError where a sequence of a recipe can be longer than the model has positions."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions and longest > positions:
        raise InputError(
            f"{model.config.name_or_path}: sequences of up to {longest} tokens, but positions for"
            f" {positions}: make the recipe's max_length (rlhf: max_prompt_length,"
            " max_response_length) smaller"
        )


def model_size(model):
    """Weights in all and to train, and what attention costs besides, for NAME.run.json.

    Before ZeRO 3 cuts them up.
    """
    weights = list(model.parameters())
    return {
        "weights": sum(weight.numel() for weight in weights),
        "trained": sum(weight.numel() for weight in weights if weight.requires_grad),
        "layers": model.config.num_hidden_layers,
        "hidden_size": model.config.hidden_size,
    }


def supports_packing(model):
    """Whether a row of a pass can hold several sequences, told apart by a mask of booleans.

    The pass then has use_cache=False, a mask [1, 1, T, T], true where a column is seen, and
    position_ids.
    """
    return (
        model.config.model_type in MASKED_FAMILIES
        and model.config._attn_implementation == "sdpa"
        # A given mask stands for the window too, and does not know of it.
        and getattr(model.config, "sliding_window", None) is None
    )


def save_model(model, tokenizer, folder):
    """Write a folder that from_pretrained loads: safetensors, config, tokenizer.

    Adapters are merged; in the subfolder adapter they are by themselves, if they are all that was
    trained. Under ZeRO 3 the caller gathers the weights. Of several processes the first one writes.
    """
    if rank() > 0:
        return
    weights = None
    if hasattr(model, "peft_config"):
        save_adapter(model, folder / "adapter")
        weights = merged_weights(model)
    if model.can_generate():
        ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
        model.generation_config = GenerationConfig(do_sample=True, **ids)
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
