"""How forward passes use a device: micro-batches, shapes that repeat, captured decoding.

The placement of a job selects it. Like torch's backend flags it applies to the whole process:
choose_device configures it, before models are loaded. None of it changes what is computed,
apart from rounding. Deterministic kernels are a setting, which choose_device applies too.
"""

import contextlib
import functools
import importlib.util
import inspect
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import Cache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from snakechat.workflow import processes
from snakechat.workflow.errors import InputError
from snakechat.workflow.processes import SERIAL, Placement

# Of packed sequences on a GPU. Kernels, plans and compiled code are chosen by shape: few shapes
# repeat. 128 is also the tile of GPUs' matrix products.
GPU_PAD_TO_MULTIPLE_OF = 128
# Logits that exist at a time: 256 MB in 16 bits and 512 MB in fp32. The product with the output
# layer is then large enough for the whole GPU: 2,670 tokens of OPT's vocabulary.
GPU_CHUNK_LOGITS = 1 << 27
# Tokens between two checks of whether responses have ended. On a GPU each check waits for all
# kernels, and on a CPU it costs nothing.
GPU_STOP_CHECK_STEPS = 8
# Versions of a layer for different kinds of shapes, layers and models. torch runs the layers
# without compilation beyond this number.
MAX_VERSIONS = 64
HAS_RECOMPILE_LIMIT = "recompile_limit" in inspect.signature(torch.compile).parameters
# Any of these compiles what torch generates.
COMPILERS = ("gcc", "g++", "clang")


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


_current = Acceleration()


def current() -> Acceleration:
    """Return the choices of this process."""
    return _current


@contextlib.contextmanager
def using(choices: Acceleration) -> Iterator[None]:
    """Context in which this process has other choices."""
    global _current
    previous, _current = _current, choices
    try:
        yield
    finally:
        _current = previous


def choose_device(placement: Placement) -> torch.device:
    """Return the device of a placement, and apply the placement's choices to this process.

    Those that it lacks follow the device. Raises InputError without the GPU that it requires.
    """
    global _current
    on_gpu = placement.gpus_per_node > 0
    if on_gpu and not torch.cuda.is_available():
        raise InputError("placement requires a GPU, but torch finds none: set gpus_per_node: 0")
    of_gpu: dict[str, Any] = {
        "pad_to_multiple_of": GPU_PAD_TO_MULTIPLE_OF,
        "stop_check_steps": GPU_STOP_CHECK_STEPS,
        "chunk_logits": GPU_CHUNK_LOGITS,
        "fp32_chunk_logits": GPU_CHUNK_LOGITS,
        # A CPU has no FlashAttention, and cannot capture a graph.
        "attn_implementation": placement.attn_implementation,
        "cuda_graphs": placement.cuda_graphs is not False,
    }
    _current = Acceleration(
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
    if not on_gpu or processes.uses_deterministic_kernels():
        # Otherwise, an operation without such a kernel is a warning.
        is_strict = processes.uses_deterministic_kernels()
        torch.use_deterministic_algorithms(True, warn_only=not is_strict)
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
    if HAS_RECOMPILE_LIMIT:
        options["recompile_limit"] = MAX_VERSIONS
    else:
        # torch 2.11 has no limit of one function, but one of the process.
        cast(Any, torch.compiler.config).recompile_limit = MAX_VERSIONS
    # Also torch's annotations lack the limit.
    return cast(Any, torch.compile)(function, **options)


def can_compile() -> bool:
    """Return whether layers can be compiled for a GPU: with a C compiler and Python's headers."""
    return (
        any(map(shutil.which, (*COMPILERS, os.environ.get("CC", ""))))
        and Path(sysconfig.get_path("include"), "Python.h").exists()
        and importlib.util.find_spec("triton") is not None
    )
