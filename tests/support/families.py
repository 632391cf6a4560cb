"""Tiny models of a few families that differ in kind: keys of their transformers configs.

FAMILIES are architectures. CHECKPOINTS are what users start from: a model with its tokenizer, chat
template and stop tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from snakechat.modeling.models import make_causal
from support import family_tokenizers

SIZE = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
LLAMA = {**SIZE, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
OPT = {**SIZE, "model_type": "opt", "ffn_dim": 64, "max_position_embeddings": 64, "init_std": 0.06}

FAMILIES = {
    "opt": {**OPT, "word_embed_proj_dim": 32, "dropout": 0.1},
    "opt-350m": {**OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "gpt2": {**SIZE, "model_type": "gpt2", "n_positions": 64},
    "bloom": {**SIZE, "model_type": "bloom"},
    "llama": {**LLAMA, "model_type": "llama"},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 8},
    # A layer with a window, and one without.
    "gemma3_text": {
        **LLAMA,
        "model_type": "gemma3_text",
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window_pattern": 2,
        "sliding_window": 6,
    },
}

# Models with windows that are shorter than the sequences of the tests: of Mistral in both layers,
# of Qwen in the second one.
WINDOWS = {
    "mistral, window": {**LLAMA, "model_type": "mistral", "sliding_window": 6},
    "qwen3, window": {
        **FAMILIES["qwen3"],
        "sliding_window": 6,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
}


def spread(model):
    """The model with weights so large that every token matters to those behind it."""
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            noise = 0.25 * torch.randn_like(weight)
            weight.copy_(noise if weight.ndim > 1 else weight + noise)
    return model.train()


class Checkpoint(NamedTuple):
    """A checkpoint as the hub has it, but with a tiny model.

    Attributes:
        config: Keys of the model's transformers config.
        tokenizer: A function that makes the tokenizer.
        end_of_turn: The token that ends a response.
        stops: Further tokens of eos_token_id in generation_config.json.
        template: The prompt template: "chat" is the tokenizer's own.
        spare: Embeddings without a token.
    """

    config: dict[str, Any]
    tokenizer: Callable[[], PreTrainedTokenizerBase]
    end_of_turn: str
    stops: tuple[str, ...] = ()
    template: str = "chat"
    spare: int = 0


def large(family, **changes):
    """The config of a family with space for several turns.

    Its weights are so large that every token matters to those behind it.
    """
    positions = {"n_positions": 512} if family == "gpt2" else {"max_position_embeddings": 512}
    return {**FAMILIES[family], **positions, "initializer_range": 0.2, **changes}


# A dialogue format, a chat template with a window shorter than the dialogues, and an end of turn
# that is not eos.
CHECKPOINTS = {
    "gpt2": Checkpoint(
        large("gpt2"), family_tokenizers.gpt2, "<|endoftext|>", template="dialogue", spare=27
    ),
    "mistral": Checkpoint(
        large("llama", model_type="mistral", sliding_window=16), family_tokenizers.mistral, "</s>"
    ),
    "qwen2.5": Checkpoint(
        large("llama", model_type="qwen2", tie_word_embeddings=True),
        family_tokenizers.qwen2_5,
        "<|im_end|>",
        ("<|endoftext|>",),
        spare=8,
    ),
}


def save_checkpoint(checkpoint, folder):
    """Write the folder of a checkpoint as the hub has it."""
    tokenizer = checkpoint.tokenizer()
    model = make_causal(checkpoint.config, tokenizer, seed=1)
    model.resize_token_embeddings(len(tokenizer) + checkpoint.spare, mean_resizing=False)
    stops = tokenizer.convert_tokens_to_ids([checkpoint.end_of_turn, *checkpoint.stops])
    model.generation_config.eos_token_id = stops
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
