"""Models as GGUF files: the weights under llama.cpp's names, and what it has to know of the model.

Memory holds one weight at a time.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    GGML_QUANT_VERSION,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    MODEL_TENSOR,
    TENSOR_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
    get_tensor_name_map,
    quant_shape_to_byte_shape,
)
from gguf.quants import quantize
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from snakechat.data.gguf_vocabulary import write_vocabulary
from snakechat.workflow.errors import InputError

Array = np.ndarray[Any, Any]


class Family(NamedTuple):
    """What distinguishes the models of a family in llama.cpp.

    Attributes:
        architecture: llama.cpp's.
        activation: The only one that llama.cpp computes.
        rotates_neighbours: Whether llama.cpp rotates neighbouring features of queries and keys;
            transformers rotates those of the first half with those of the second.
        norm_offset: What llama.cpp has as part of the weights of norms.
    """

    architecture: MODEL_ARCH
    activation: str = "silu"
    rotates_neighbours: bool = False
    norm_offset: float = 0.0


FAMILIES = {
    "gemma": Family(MODEL_ARCH.GEMMA, activation="gelu_pytorch_tanh", norm_offset=1.0),
    "llama": Family(MODEL_ARCH.LLAMA, rotates_neighbours=True),
    "mistral": Family(MODEL_ARCH.LLAMA, rotates_neighbours=True),
    "qwen2": Family(MODEL_ARCH.QWEN2),
    "qwen3": Family(MODEL_ARCH.QWEN3),
}

# Settings of the config: the type of matrices, and that of the file.
QUANTIZATIONS = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}


class Weight(NamedTuple):
    """A weight of the file.

    Attributes:
        shape: Shape, as in PyTorch.
        kind: Type of its numbers.
        read: Returns it in fp32.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    read: Callable[[], Array]


def load_config(folder: Path) -> PreTrainedConfig:
    """Return the config of a model that can be exported.

    Raises:
        InputError: llama.cpp computes such models in another way, or not at all.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise InputError(
            f"{folder} is a model of the family {config.model_type}, which cannot be exported to"
            f" GGUF: the families are {', '.join(FAMILIES)}"
        )
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in (family.activation, {"gelu_pytorch_tanh": "gelu"}.get(family.activation)):
        raise InputError(
            f"{folder}: the activation of the model is {activation}; llama.cpp has"
            f" {family.activation} in models of the family {config.model_type}"
        )
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in ("default", "linear", "llama3"):
        raise InputError(
            f"{folder}: the positions of the model are scaled by {rope_type}; default, linear and"
            " llama3 can be exported to GGUF"
        )
    return config


def write_gguf(
    path: Path,
    folder: Path,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    quantization: str,
    name: str,
) -> None:
    """Write a model folder as a GGUF file.

    Args:
        config: From load_config.
        quantization: A key of QUANTIZATIONS. Vectors stay in fp32.
        name: Name of the model in the file.

    Raises:
        InputError: llama.cpp has no such tokenizer, or a weight exceeds the numbers of f16.
    """
    kind, file_type = QUANTIZATIONS[quantization]
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[FAMILIES[config.model_type].architecture])
    writer.add_name(name)
    writer.add_file_type(file_type)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    write_hyperparameters(writer, config)
    write_vocabulary(writer, tokenizer, config.vocab_size)
    weights = dict(weights_of(folder, config, kind))
    for name, weight in weights.items():
        size = math.prod(quant_shape_to_byte_shape(weight.shape, weight.kind))
        writer.add_tensor_info(name, weight.shape, np.dtype(np.float32), size, weight.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, weight in weights.items():
        with np.errstate(over="ignore"):
            values = quantize(weight.read(), weight.kind)
        if weight.kind == GGMLQuantizationType.F16 and not np.isfinite(values).all():
            raise InputError(
                f"{folder}: {name} has values above 65,504, the largest number of f16: set"
                " gguf.quantization to bf16"
            )
        writer.write_tensor_data(values)
    writer.close()


def write_hyperparameters(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    """Write the sizes of a model, its constants and its positions."""
    head_size = head_size_of(config)
    # llama.cpp's models of these families attend to all tokens. Within a window that is the same.
    has_window = getattr(config, "use_sliding_window", True)
    window = getattr(config, "sliding_window", None) if has_window else None
    positions: int = config.max_position_embeddings
    writer.add_context_length(min(positions, window or positions))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])


def weights_of(
    folder: Path, config: PreTrainedConfig, kind: GGMLQuantizationType
) -> Iterator[tuple[str, Weight]]:
    """Yield the weights of the file by their names. kind: the type of matrices."""
    family = FAMILIES[config.model_type]
    names = get_tensor_name_map(family.architecture, config.num_hidden_layers)
    if config.rope_parameters["rope_type"] == "llama3":
        factors = frequency_factors(config)
        factors_name = f"{TENSOR_NAMES[MODEL_TENSOR.ROPE_FREQS]}.weight"
        yield factors_name, Weight(factors.shape, GGMLQuantizationType.F32, lambda: factors)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        for source, shape in shapes.items():
            # A tied head is the embedding.
            if source == "lm_head.weight" and config.tie_word_embeddings:
                continue
            name = names.get_name(source, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise InputError(f"{path}: llama.cpp has no weight {source} in such models")
            read = reader(path, source, config)
            yield name, Weight(shape, kind_of(shape, kind), read)


def kind_of(shape: tuple[int, ...], kind: GGMLQuantizationType) -> GGMLQuantizationType:
    """Return the type of a weight: vectors in fp32, rows that are no whole blocks in f16."""
    if len(shape) == 1:
        return GGMLQuantizationType.F32
    if kind == GGMLQuantizationType.Q8_0 and shape[-1] % GGML_QUANT_SIZES[kind][0]:
        return GGMLQuantizationType.F16
    return kind


def reader(path: Path, name: str, config: PreTrainedConfig) -> Callable[[], Array]:
    """Return a function that reads a weight as llama.cpp has it, in fp32."""
    family = FAMILIES[config.model_type]

    def read() -> Array:
        with safe_open(path, "pt") as file:
            weight = file.get_tensor(name).float()
        if "norm" in name.split(".")[-2]:
            weight = weight + family.norm_offset
        if family.rotates_neighbours and ".q_proj." in name:
            weight = with_neighbours(weight, config.num_attention_heads)
        if family.rotates_neighbours and ".k_proj." in name:
            weight = with_neighbours(weight, config.num_key_value_heads)
        array: Array = weight.numpy()
        return array

    return read


def with_neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return weights [heads * size, ...] whose features i and i + size/2 are neighbours."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def frequency_factors(config: PreTrainedConfig) -> Array:
    """Return what llama.cpp divides each frequency of the positions by."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = head_size_of(config)
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    frequencies = 1.0 / config.rope_parameters["rope_theta"] ** exponents
    factors: Array = (frequencies / scaled).numpy()
    return factors


def head_size_of(config: PreTrainedConfig) -> int:
    """Return the features of an attention head."""
    size: int | None = getattr(config, "head_dim", None)
    return size or config.hidden_size // config.num_attention_heads
