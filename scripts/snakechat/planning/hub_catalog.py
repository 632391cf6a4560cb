"""Configs of models and sizes of datasets of the Hugging Face hub.

Estimates use them before a model or dataset is downloaded; afterwards they read its own files.
"""

from typing import Any


def _opt(layers: int, hidden_size: int, heads: int, **others: Any) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "num_hidden_layers": layers,
        "hidden_size": hidden_size,
        "word_embed_proj_dim": hidden_size,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden_size,
    } | others


# Sources of the configs. OPT: Zhang et al. 2022, table 1 (350m has narrower embeddings and norms
# after each block); Llama 2: Touvron et al. 2023; BLOOM: Workshop 2022, table 3; mGPT: Shliazhko et
# al. 2022; SmolLM2, Qwen3 and Llama 3.2: config.json of the Hub (https://huggingface.co/OWNER/NAME).
MODEL_CONFIGS: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": _opt(12, 768, 12),
    "facebook/opt-350m": _opt(24, 1024, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "facebook/opt-1.3b": _opt(24, 2048, 32),
    "facebook/opt-6.7b": _opt(32, 4096, 32),
    "facebook/opt-13b": _opt(40, 5120, 40),
    "facebook/opt-30b": _opt(48, 7168, 56),
    "facebook/opt-66b": _opt(64, 9216, 72),
    "meta-llama/Llama-2-7b-hf": {
        "model_type": "llama",
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
    },
    "bigscience/bloom-1b1": {
        "model_type": "bloom",
        "vocab_size": 250880,
        "n_layer": 24,
        "hidden_size": 1536,
        "n_head": 16,
    },
    "ai-forever/mGPT": {
        "model_type": "gpt2",
        "vocab_size": 100000,
        "n_positions": 2048,
        "n_layer": 24,
        "n_embd": 2048,
        "n_head": 16,
    },
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "model_type": "llama",
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-0.6B-Base": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.2-1B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "tie_word_embeddings": True,
    },
}

# Rows of each split, as the hub listed them in 2023 (smol-smoltalk: in 2024). 40 % of the training
# rows of the first six are the 264,292 prompts of DeepSpeed-Chat's benchmark.
DATASET_ROWS = {
    "Dahoas/rm-static": {"train": 76_256, "eval": 5_103},
    "Dahoas/full-hh-rlhf": {"train": 112_052, "eval": 12_451},
    "Dahoas/synthetic-instruct-gptj-pairwise": {"train": 29_829, "eval": 3_314},
    "yitingxie/rlhf-reward-datasets": {"train": 76_256, "eval": 5_103},
    "openai/webgpt_comparisons": {"train": 17_620, "eval": 1_958},
    "stanfordnlp/SHP": {"train": 348_718, "eval": 18_436},
    "Anthropic/hh-rlhf": {"train": 160_800, "eval": 8_552},
    "HuggingFaceTB/smol-smoltalk": {"train": 460_341, "eval": 24_229},
    "HuggingFaceH4/ultrafeedback_binarized": {"train": 61_135, "eval": 2_000},
}
