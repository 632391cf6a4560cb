"""Models: making, loading and saving them, and the device that they are on."""

import math
import os
import pickle
import warnings

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
)

from rlhf.job import InputError

# Progress bars of single files and reports on heads that are meant to be new say nothing here.
transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()
# Between peft and transformers: nothing that a user could change.
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
# transformers imports DeepSpeed when it is installed, which warns where it finds no accelerator.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Dropout is off in every phase: PPO's first ratio is then exactly 1, and a run can be repeated.
DROPOUTS = (
    "activation_dropout",
    "attention_dropout",
    "attn_pdrop",
    "classifier_dropout",
    "dropout",
    "embd_pdrop",
    "hidden_dropout",
    "layerdrop",
    "resid_pdrop",
)


def choose_device(placement):
    """The device of a placement. Raises InputError where it asks for a GPU and there is none."""
    if placement["gpus_per_node"] == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("placement asks for a GPU and torch finds none: set gpus_per_node: 0")
    return torch.device("cuda")


def _config(folder, **changes):
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    for name in DROPOUTS:
        if getattr(config, name, None):
            setattr(config, name, 0.0)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


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
    """The causal language model of a folder. Raises InputError if it lacks ids of the tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=_config(folder), dtype=DTYPES[dtype], local_files_only=True
    )
    _check_vocabulary(model, tokenizer, folder)
    return model


def load_scorer(folder, dtype, tokenizer, new_head=False):
    """A model with one score for each position: a reward model, or a critic.

    new_head: the folder has a language model; the head starts with deviation 1 / sqrt(d + 1)
    (Stiennon et al. 2020, appendix). Otherwise the folder must have the head: transformers would
    make up a random one, which is refused with InputError.
    """
    config = _config(folder, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        folder,
        config=config,
        dtype=DTYPES[dtype],
        local_files_only=True,
        output_loading_info=True,
    )
    missing = loading["missing_keys"] - ({"score.weight"} if new_head else set())
    if missing:
        raise InputError(f"{folder}: weights are missing: {', '.join(sorted(missing))}")
    if new_head:
        nn.init.normal_(model.score.weight, std=1 / math.sqrt(model.score.in_features + 1))
    _check_vocabulary(model, tokenizer, folder)
    return model


def _check_vocabulary(model, tokenizer, folder):
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise InputError(f"{folder}: {len(tokenizer)} tokens, but {rows} embeddings")


def add_lora(model, rank, alpha):
    """The model with LoRA adapters on all linear layers but the output (Hu et al. 2021)."""
    lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


def save_model(model, tokenizer, folder):
    """Write a folder that from_pretrained loads: safetensors, config, tokenizer."""
    if hasattr(model, "peft_config"):
        model = model.merge_and_unload()
    if model.can_generate():
        ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
        model.generation_config = GenerationConfig(do_sample=True, **ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
