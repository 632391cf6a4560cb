"""Which model families can be captured: tiny models on emulated CUDA.

Prints a table, and JSON: for each family, why a graph cannot have its pass, or null.
"""

import json
import warnings

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gpu.emulated_cuda import DEVICE, emulation
from snakechat.modeling import captured_decoding

LLAMA = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
LLAMA |= {"pad_token_id": 0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}
EXPERTS = {**LLAMA, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 16}
HEADS = {**LLAMA, "head_dim": 8}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
FAMILIES = {
    "opt": {**LLAMA, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt2": GPT2,
    "gptj": {**GPT2, "rotary_dim": 4},
    "gpt_neox": LLAMA,
    "gpt_neo": {**LLAMA, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    "gpt_bigcode": GPT2,
    "bloom": {**LLAMA, "n_layer": 2, "n_head": 4},
    "falcon": LLAMA,
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64},
    "llama": LLAMA,
    "llama, dynamic": {**LLAMA, "rope_parameters": DYNAMIC},
    "qwen2": LLAMA,
    "qwen3": HEADS,
    "mistral": {**LLAMA, "sliding_window": None},
    "mistral, window": {**LLAMA, "sliding_window": 8},
    "phi": LLAMA,
    "phi3": LLAMA,
    "phi3, longrope": {
        **LLAMA,
        "rope_scaling": LONGROPE,
        "original_max_position_embeddings": 32,
    },
    "gemma": HEADS,
    "gemma2": {**HEADS, "sliding_window": 8},
    "gemma3_text": {**HEADS, "sliding_window": 8},
    "olmo": LLAMA,
    "olmo2": LLAMA,
    "smollm3": HEADS,
    "granite": LLAMA,
    "stablelm": LLAMA,
    "starcoder2": LLAMA,
    "cohere": LLAMA,
    "glm": HEADS,
    "mixtral": EXPERTS,
    "qwen3_moe": {**EXPERTS, "head_dim": 8},
    "olmoe": EXPERTS,
    "mamba": {**LLAMA, "state_size": 8},
}


def problem(family, keys):
    """Return why a graph cannot have the pass of a family; None if it can."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.partition(",")[0], **keys)
    model = AutoModelForCausalLM.from_config(config).eval()
    if not captured_decoding.takes_dense_mask(model):
        return "takes no mask of four dimensions, or drops tokens"
    with emulation():
        return captured_decoding._capture_problem(model.to(DEVICE))


def main():
    warnings.simplefilter("ignore")
    found = {}
    for family, keys in FAMILIES.items():
        found[family] = problem(family, keys)
        print(f"{family:16} {found[family] or 'captured'}", flush=True)
    print(json.dumps(found))
