"""Models: loading, saving, and the passes that training needs of them.

A pass computes what its loss asks for and no more: log-probabilities of some tokens, or values at
some positions. Logits or scores of other positions are never made.

Shapes: B sequences, T tokens, N selected tokens of all sequences, row after row.
"""

import math
import os
import pickle
import warnings

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
)

from rlhf.batches import micro_batches, pad, span_mask
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


class Policy(nn.Module):
    """A causal language model whose pass gives log-probabilities of chosen tokens."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    @property
    def causal(self):
        """The transformers model, inside its adapters if it has some."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    def forward(self, input_ids, attention_mask, targets, temperature=1.0, entropies=False):
        """Log-probabilities [N] of the tokens at targets, each given those before it.

        input_ids, attention_mask: [B, T]; targets: [B, T] bool, false at position 0. With
        entropies, a pair: these, and the entropy [N] of what each token was drawn from.
        """
        hidden = self.causal.base_model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        logits = self.causal.get_output_embeddings()(hidden[:, :-1][targets[:, 1:]])
        logits = logits.float() / temperature
        logprobs = -functional.cross_entropy(logits, input_ids[targets], reduction="none")
        if not entropies:
            return logprobs
        return logprobs, torch.distributions.Categorical(logits=logits.detach()).entropy()


class Scorer(nn.Module):
    """A model with a score head whose pass gives the head's outputs at chosen positions.

    The outputs are standardised: a critic that starts as the reward model must speak of rewards in
    the same units as those that it is taught.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.mean, self.deviation = 0.0, 1.0

    def forward(self, input_ids, attention_mask, positions):
        """Outputs [N] at positions. input_ids, attention_mask: [B, T]; positions: [B, T] bool."""
        hidden = self.model.base_model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        scores = self.model.score(hidden[positions]).squeeze(-1).float()
        return (scores - self.mean) / self.deviation


@torch.no_grad()
def score_last_tokens(scorer, sequences, pad_id, max_tokens):
    """Score [B] of each sequence of ids, read at its last token."""
    device = next(scorer.parameters()).device
    lengths = [len(sequence) for sequence in sequences]
    scores = torch.zeros(len(sequences), device=device)
    for rows in micro_batches(range(len(sequences)), lengths, max_tokens):
        input_ids, attention_mask = pad([sequences[row] for row in rows], pad_id, device)
        ends = [lengths[row] for row in rows]
        last = span_mask([end - 1 for end in ends], ends, input_ids.shape[1], device)
        scores[rows] = scorer(input_ids, attention_mask, last)
    return scores


def save_model(model, tokenizer, folder):
    """Write a folder that from_pretrained loads: safetensors, config, tokenizer."""
    if hasattr(model, "peft_config"):
        model = model.merge_and_unload()
    if model.can_generate():
        ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
        model.generation_config = GenerationConfig(do_sample=True, **ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
