"""A tiny model of each family that is trained here: keys of its transformers config."""

import torch

SIZE = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
LLAMA = {**SIZE, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
OPT = {**SIZE, "model_type": "opt", "ffn_dim": 64, "max_position_embeddings": 64, "init_std": 0.06}

FAMILIES = {
    "opt": {**OPT, "word_embed_proj_dim": 32, "dropout": 0.1},
    "opt-350m": {**OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "gpt2": {**SIZE, "model_type": "gpt2", "n_positions": 64},
    "gpt_neox": {
        **SIZE,
        "model_type": "gpt_neox",
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    },
    "bloom": {**SIZE, "model_type": "bloom"},
    "llama": {**LLAMA, "model_type": "llama"},
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 8},
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": None},
    "gemma": {**LLAMA, "model_type": "gemma", "head_dim": 8},
    "phi3": {**LLAMA, "model_type": "phi3"},
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

# Models with windows that are shorter than the sequences of the tests: of Mistral and Phi-3 in both
# layers, of Qwen in the second one.
WINDOW = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}
WINDOWS = {
    f"{family}, window": {**FAMILIES[family], "sliding_window": 6} for family in ("mistral", "phi3")
}
WINDOWS |= {f"{family}, window": {**FAMILIES[family], **WINDOW} for family in ("qwen2", "qwen3")}

GATED = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
OPT_LAYERS = ["fc1", "fc2", "k_proj", "out_proj", "q_proj", "v_proj"]
FUSED = ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"]

# The linear layers of each family's blocks.
LINEAR_LAYERS = {
    "opt": OPT_LAYERS,
    "opt-350m": OPT_LAYERS,
    "gpt2": ["c_attn", "c_fc", "c_proj"],
    "gpt_neox": FUSED,
    "bloom": FUSED,
    "llama": GATED,
    "qwen2": GATED,
    "qwen3": GATED,
    "mistral": GATED,
    "gemma": GATED,
    "phi3": ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"],
    "gemma3_text": GATED,
}


def spread(model):
    """The model with weights so large that every token matters to those behind it."""
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            noise = 0.25 * torch.randn_like(weight)
            weight.copy_(noise if weight.ndim > 1 else weight + noise)
    return model.train()
