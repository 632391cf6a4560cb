"""Models: make new ones, what a model can do, and how its forward passes use the device.

The placement of a job selects the acceleration: micro-batches, shapes that repeat, captured
decoding, compiled layers. Like torch's backend flags it applies to the whole process: choose_device
configures it, before models are loaded. None of it changes what is computed, apart from rounding.
Deterministic kernels are a setting, which choose_device applies too.
"""

import contextlib
import functools
import importlib.util
import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    logging,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from snakechat.data.model_files import layers_problem
from snakechat.workflow.errors import InputError
from snakechat.workflow.processes import SERIAL, Placement, uses_deterministic_kernels

# Progress bars for single files, and reports on score heads that are new on purpose.
logging.disable_progress_bar()
logging.set_verbosity_error()
# Between peft and transformers: users cannot act on it.
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
# transformers imports DeepSpeed if it is installed, which warns if it finds no accelerator.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# ZeRO 3 partitions the weights of a model over the processes.

# Returns a context in which every process has the whole of some weights. All processes must enter
# it with the same weights.
Gather = Callable[[Sequence[torch.Tensor]], contextlib.AbstractContextManager[Any]]
# For weights that every process has.
no_gather: Gather = contextlib.nullcontext

# Returns the whole fp32 value of a weight in training. All processes must call it with the same
# weight.
Master = Callable[[torch.Tensor], torch.Tensor]

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Logits that exist at a time on a GPU: 256 MB in 16 bits and 512 MB in fp32. The product with the
# output layer is then large enough for the whole GPU: 2,670 tokens of OPT's vocabulary.
GPU_CHUNK_LOGITS = 1 << 27
# Versions of a layer for different kinds of shapes, layers and models. torch runs the layers
# without compilation beyond this number.
MAX_VERSIONS = 64
# Any of these compiles what torch generates.
COMPILERS = ("gcc", "g++", "clang")


def make_causal(
    init: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """Create a causal language model with random weights.

    init: keys of the model's transformers config. Raises InputError if transformers rejects them.
    """
    ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
    torch.manual_seed(seed)
    for name in init:
        if "attn_implementation" in name:
            raise InputError(f"init: {name}: set attn_implementation in the placement instead")
    if problem := layers_problem(init):
        raise InputError(f"init: {problem}")
    try:
        config = AutoConfig.for_model(**init, vocab_size=len(tokenizer), **ids)
        return AutoModelForCausalLM.from_config(config)
    except Exception as error:
        # Keys of init that do not fit together end in any exception of transformers or torch.
        message = " ".join(str(error).split())
        raise InputError(f"init {init}: {type(error).__name__}: {message}") from None


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Have the backward passes of a model compute the activations of its layers again."""
    # transformers 5.17 has the old name alone.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def describe(model: PreTrainedModel) -> str:
    """Return the folder and the type of a model."""
    return f"{model.config.name_or_path or 'the model'}: model_type {model.config.model_type}"


def check_sequence_length(model: PreTrainedModel, longest: int) -> None:
    """Raise InputError if the longest sequence of a recipe exceeds the model's positions."""
    positions = max_positions(model)
    if positions and longest > positions:
        is_longrope = positions < getattr(model.config, "max_position_embeddings", positions)
        reason = " before rope_type longrope changes their angles" if is_longrope else ""
        raise InputError(
            f"{model.config.name_or_path}: sequences of up to {longest} tokens exceed the model's"
            f" {positions} positions{reason}: reduce the recipe's max_length (rlhf:"
            " max_prompt_length, max_response_length), or name another model"
        )


def max_positions(model: PreTrainedModel) -> int | None:
    """Return the number of tokens of the longest sequence, or None without a limit.

    With longrope, the angles of all positions depend on the longest sequence of a batch if it
    exceeds the original length: log-probabilities would depend on the batch of a row.
    """
    limits = [getattr(model.config, "max_position_embeddings", None)]
    rope = getattr(model.config, "rope_parameters", None) or {}
    # One for all layers, or one for each type of layers.
    for parameters in (rope, *rope.values()):
        if isinstance(parameters, Mapping) and parameters.get("rope_type") == "longrope":
            limits.append(parameters["original_max_position_embeddings"])
    return min((limit for limit in limits if limit), default=None)


def model_size(model: PreTrainedModel) -> dict[str, int]:
    """Return the numbers of weights and trained weights, and what attention FLOPs depend on.

    The keys are the same as in run.json.
    """
    sizes = [(whole_shape(weight).numel(), weight.requires_grad) for weight in model.parameters()]
    return {
        "weights": sum(size for size, _ in sizes),
        "trained": sum(size for size, trained in sizes if trained),
        "layers": model.config.num_hidden_layers,
        "hidden_size": model.config.hidden_size,
    }


def supports_packing(model: PreTrainedModel) -> bool:
    """Return whether a sequence may pack several rows, separated by a boolean mask.

    The model is then called with use_cache=False, position_ids and a mask [B, 1, T, T], True where
    a token attends to another. A given mask replaces the mask of a sliding window. Eager attention
    would add the mask as numbers. Whether a model with SDPA uses mask and positions is measured
    (snakechat/modeling/model_check.py).
    """
    return model.config._attn_implementation == "sdpa"


def whole_shape(weight: torch.Tensor) -> torch.Size:
    """Return the shape of a weight, partitioned or not."""
    # DeepSpeed's attribute of a partitioned one.
    return getattr(weight, "ds_shape", weight.shape)


# --- acceleration ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Acceleration:
    """Choices for a device. The defaults suit a CPU.

    Attributes:
        micro_batch_tokens: Limit of tokens in a micro-batch, padding included.
        pad_to_multiple_of: Packed sequences are padded to a multiple of this number of tokens.
        stop_check_steps: Tokens between two checks of whether responses have ended.
        cuda_graphs: Capture the forward pass that samples a token, and replay it.
        generate_tokens: Limit of tokens in a batch of responses; None: as many as the memory of a
            GPU allows, and micro_batch_tokens on a CPU.
        attn_implementation: Kernel of packed sequences: sdpa, or auto, which is FlashAttention
            where the batch and the GPU support it (snakechat.modeling.attention).
        compile: Compile the layers of models.
        min_response: Mean tokens of responses to a prompt from which on a CPU computes their
            attention without a dense mask, which is then faster.
        chunk_logits: Logits that exist at a time: 64 MB in 16 bits.
        fp32_chunk_logits: Logits that exist in fp32 at a time: 8 MB, which fit a CPU's caches.
    """

    micro_batch_tokens: int = SERIAL.micro_batch_tokens
    pad_to_multiple_of: int = 1
    stop_check_steps: int = 1
    cuda_graphs: bool = False
    generate_tokens: int | None = None
    attn_implementation: str = "sdpa"
    compile: bool = False
    min_response: int = 64
    chunk_logits: int = 1 << 25
    fp32_chunk_logits: int = 1 << 21


_acceleration = Acceleration()


def acceleration() -> Acceleration:
    """Return the choices of this process."""
    return _acceleration


@contextlib.contextmanager
def accelerated(choices: Acceleration) -> Iterator[None]:
    """Context in which this process has other choices."""
    global _acceleration
    previous, _acceleration = _acceleration, choices
    try:
        yield
    finally:
        _acceleration = previous


def choose_device(placement: Placement) -> torch.device:
    """Return the device of a placement, and apply the placement's choices to this process.

    Those that it lacks follow the device. Raises InputError without the GPU that it requires.
    """
    global _acceleration
    on_gpu = placement.gpus_per_node > 0
    if on_gpu and not torch.cuda.is_available():
        raise InputError("placement requires a GPU, but torch finds none: set gpus_per_node: 0")
    of_gpu: dict[str, Any] = {
        # Kernels, plans and compiled code are chosen by shape: few shapes repeat. 128 is also the
        # tile of GPUs' matrix products.
        "pad_to_multiple_of": 128,
        # Each check waits for all kernels, and on a CPU it costs nothing.
        "stop_check_steps": 8,
        "chunk_logits": GPU_CHUNK_LOGITS,
        "fp32_chunk_logits": GPU_CHUNK_LOGITS,
        # A CPU has no FlashAttention, and cannot capture a graph.
        "attn_implementation": placement.attn_implementation,
        "cuda_graphs": placement.cuda_graphs is not False,
    }
    _acceleration = Acceleration(
        micro_batch_tokens=placement.micro_batch_tokens,
        generate_tokens=placement.generate_tokens,
        compile=bool(placement.compile),
        **(of_gpu if on_gpu else {}),
    )
    if on_gpu:
        # cuDNN builds a plan for each new shape of masked attention, which takes up to a second,
        # and torch prefers it on Hopper. The memory-efficient kernels need no plans.
        torch.backends.cuda.enable_cudnn_sdp(False)
    # The threads of a CPU add the gradients of indexed rows in any order, too.
    if not on_gpu or uses_deterministic_kernels():
        # Without the setting, an operation without such a kernel is a warning.
        torch.use_deterministic_algorithms(True, warn_only=not uses_deterministic_kernels())
        # It would write to memory that deferred weights reserve and never use.
        cast(Any, torch.utils.deterministic).fill_uninitialized_memory = False
    return torch.device("cuda" if on_gpu else "cpu")


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the CPU on a device, without waiting for the kernels that run there."""
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def round_up(length: int, multiple: int) -> int:
    """Return the smallest multiple that is not less than a length."""
    return -(-length // multiple) * multiple


# --- compiled layers (regional compilation by torch.compile) ------------------------------------


def compile_layers(model: PreTrainedModel) -> None:
    """Compile the forward passes of a model's decoder layers, in place.

    All layers share what is compiled for one of them; whole models would compile longer. Names of
    weights do not change, and adapters may be added before. With a key-value cache, layers run
    without compilation: it grows by a token in each call.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            cast(Any, layer).forward = _compiled_without_cache(layer.forward)


def _compiled_without_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    compiled = compile_versions(forward)

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        has_cache = any(isinstance(value, Cache) for value in (*args, *kwargs.values()))
        return (forward if has_cache else compiled)(*args, **kwargs)

    return call


def compile_versions(function: Callable[..., Any], **options: Any) -> Any:
    """Return a function that torch.compile compiles for at most MAX_VERSIONS kinds of arguments."""
    # For all functions of the process: torch 2.11 has no limit of a single one.
    cast(Any, torch.compiler.config).recompile_limit = MAX_VERSIONS
    return torch.compile(function, **options)


def can_compile() -> bool:
    """Return whether layers can be compiled for a GPU: with a C compiler and Python's headers."""
    return (
        any(map(shutil.which, (*COMPILERS, os.environ.get("CC", ""))))
        and Path(sysconfig.get_path("include"), "Python.h").exists()
        and importlib.util.find_spec("triton") is not None
    )
