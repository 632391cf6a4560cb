"""CUDA tensors on a CPU: they claim to be on a GPU, and the CPU computes them.

    with emulation() as counts:
        ...

It needs the compiled cuda_guard.cpp, which the fixture `emulated` preloads.

As on a GPU, an operation on tensors of both devices raises an error, and so does an operation
without a deterministic kernel if deterministic kernels are requested. Operations for which the host
waits for the GPU are counted by their place in our code: reading a number, boolean masks, copies to
the host, and results whose size only the device knows. Copies to the device from memory that is not
pinned are counted too.
"""

import contextlib
import math
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch.cuda import nvtx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from snakechat.modeling import attention as attention_module
from snakechat.modeling import forward
from snakechat.modeling.generation import FixedDecoder
from support.varlen import loop_over_segments

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
DEVICE, MEMORY = torch.device("cuda", 0), 80 << 30

aten = torch.ops.aten
# Operations whose value or size the host needs.
WAITING = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default),
    *(aten.equal.default, aten._unique2.default, aten.is_nonzero.default),
}
# Operations that take indices on the host, too.
INDEXING = {
    *(aten.index.Tensor, aten.index_put_.default, aten.index_put.default),
    aten._index_put_impl_.default,
}
# Copies, with the position of the argument that is copied.
COPYING = {aten._to_copy.default: 0, aten.copy_.default: 1}
# Operations whose CUDA kernels raise an error under use_deterministic_algorithms. Cumulative sums
# do so for floats alone.
CUMULATIVE_SUMS = ("aten::cumsum", "aten::_cumsum")
NONDETERMINISTIC = ("aten::put_", "aten::histc", "aten::bincount", "aten::kthvalue")


class Counts:
    """How often the host waited.

    Attributes:
        phase: What the program does; the caller sets it.
        waits: Number of waits by (phase, kind, place).
        mode: torch.cuda's sync_debug_mode: "error" forbids waits.
    """

    def __init__(self):
        self.phase, self.waits, self.mode = "", Counter(), "default"

    def add(self, kind):
        if self.mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {kind}")
        self.waits[self.phase, kind, place()] += 1


# The counts of the emulation that runs.
counts = Counts()


def place():
    """Return the innermost line of our code that runs, as FILE:LINE."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SCRIPTS):
            return f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


# --- tensors ----------------------------------------------------------------------------------


class CudaTensor(torch.Tensor):
    """A tensor that claims to be on the GPU. `inner` is the tensor that the CPU computes with."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return compute(function, args, kwargs or {})

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)
        self.inner = value.inner

    def __deepcopy__(self, memo):
        return CudaTensor(self.inner.clone())

    def data_ptr(self):
        return self.inner.data_ptr()

    def tolist(self):
        counts.add("tolist")
        return self.inner.tolist()

    def numpy(self, *_, **__):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __getitem__(self, index):
        # Torch makes a tensor of a list without the dispatcher.
        items = index if isinstance(index, tuple) else (index,)
        items = tuple(torch.tensor(i) if isinstance(i, (list, range)) else i for i in items)
        return super().__getitem__(items)


class Mode(TorchDispatchMode):
    """Passes operations that create a tensor on the GPU, or have one, to `compute`."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        emulated = is_cuda(kwargs.get("device")) or any(
            isinstance(each, CudaTensor) for each in values_in((args, kwargs))
        )
        return compute(function, args, kwargs) if emulated else function(*args, **kwargs)


def is_cuda(device):
    return device is not None and torch.device(device).type == "cuda"


def unwrapped(value):
    return value.inner if isinstance(value, CudaTensor) else value


def wrapped(value):
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, CudaTensor)
    return CudaTensor(value) if is_plain else value


# As tree_leaves and tree_map of torch, which take half of the time of the emulation.
def values_in(arguments):
    """Yield the values in arguments of an operation."""
    for each in arguments.values() if isinstance(arguments, dict) else arguments:
        if isinstance(each, (list, tuple, dict)):
            yield from values_in(each)
        else:
            yield each


def with_values(function, arguments):
    """Return arguments, or results, of an operation with a function of each value."""
    if isinstance(arguments, dict):
        return {name: with_values(function, each) for name, each in arguments.items()}
    if isinstance(arguments, (list, tuple)):
        return type(arguments)([with_values(function, each) for each in arguments])
    return function(arguments)


# --- operations -------------------------------------------------------------------------------


def compute(function, args, kwargs):
    """Run an operation on the inner tensors of its arguments; return what a GPU would return."""
    tensors = [each for each in values_in((args, kwargs)) if isinstance(each, torch.Tensor)]
    device = kwargs.get("device")
    if function is aten.copy_.default:
        to_gpu = isinstance(args[0], CudaTensor)
    elif device is not None:
        to_gpu = is_cuda(device)
    else:
        to_gpu = any(isinstance(each, CudaTensor) for each in tensors)
    if function in COPYING:
        count_copy(args[COPYING[function]], to_gpu)
    else:
        check(function, args, kwargs, tensors)
    inner_kwargs = with_values(unwrapped, kwargs)
    if is_cuda(device):
        inner_kwargs["device"] = torch.device("cpu")
    if function is aten.histc.default and not args[0].is_floating_point():
        # A CPU counts floats alone.
        return wrapped(function(args[0].inner.float(), *args[1:]).to(args[0].dtype))
    if function is not aten._pin_memory.default:
        inner_kwargs.pop("pin_memory", None)
    out = function(*with_values(unwrapped, args), **inner_kwargs)
    if function._schema.is_mutable and isinstance(out, torch.Tensor):
        return written_argument(function, args, kwargs)
    return with_values(wrapped, out) if to_gpu else out


def count_copy(source, to_gpu):
    """Count a copy between the devices for which the host waits."""
    from_gpu = isinstance(source, CudaTensor)
    if from_gpu and not to_gpu:
        counts.add("copy to the host")
    is_pinned = getattr(source, "is_emulated_pin", False)
    if to_gpu and not from_gpu and source.ndim and not is_pinned:
        counts.add("copy of memory that is not pinned")


def check(function, args, kwargs, tensors):
    """Raise an error where a GPU would; count a wait."""
    if not any(isinstance(each, CudaTensor) for each in tensors):
        return
    name = function._schema.name
    on_host = [each for each in tensors if not isinstance(each, CudaTensor) and each.ndim]
    is_index = function in INDEXING and isinstance(args[0], CudaTensor)
    if on_host and not is_index:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")
    if on_host:
        counts.add("index on the host")
    if function in WAITING:
        counts.add(name)
    if function is aten.index.Tensor and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    ):
        counts.add("boolean mask")
    if function is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        counts.add(name)
    if function is aten.segment_reduce.default and not kwargs.get("unsafe", False):
        counts.add(name)
    sums_floats = name in CUMULATIVE_SUMS and (
        (kwargs.get("dtype") or args[0].dtype).is_floating_point
    )
    if torch.are_deterministic_algorithms_enabled() and (sums_floats or name in NONDETERMINISTIC):
        raise RuntimeError(f"{name} does not have a deterministic implementation")


def written_argument(function, args, kwargs):
    """Return the argument that an operation writes, which is its result."""
    names = [argument.name for argument in function._schema.arguments]
    by_name = dict(zip(names, args, strict=False)) | kwargs
    for argument in function._schema.arguments:
        tensor = by_name.get(argument.name)
        if argument.alias_info and argument.alias_info.is_write and tensor is not None:
            if isinstance(tensor, CudaTensor) and tensor.size() != tensor.inner.size():
                torch.Tensor.data.__set__(tensor, CudaTensor(tensor.inner))
            return tensor
    raise AssertionError(f"{function} writes no argument")


# --- what torch calls past its dispatcher -------------------------------------------------------


def pin_memory(tensor, *_, **__):
    tensor.is_emulated_pin = True
    return tensor


def attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Compute scaled_dot_product_attention, whose kernel torch chooses by the device."""
    groups = query.shape[1] // key.shape[1] if enable_gqa else 1
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * (scale or 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    # A row without any position to attend to gives zeros.
    return aten._safe_softmax(scores, -1).to(query.dtype) @ value


varlen_attn = attention_module.varlen_attn


def varlen_attention(query, key, value, bounds, key_bounds, *arguments, **named):
    """Compute varlen_attn, which a CPU lacks. Its kernel reads the bounds on the GPU."""
    if not isinstance(query, CudaTensor):
        # Estimates run it on tensors without data.
        return varlen_attn(query, key, value, bounds, key_bounds, *arguments, **named)
    bounds, key_bounds = bounds.inner, key_bounds.inner
    return loop_over_segments(query, key, value, bounds, key_bounds, *arguments, **named)


def on_inner_tensors(function):
    """Return a function of attention.py that a CPU computes as a CPU, without its indices."""

    def call(*arguments):
        if not any(isinstance(each, CudaTensor) for each in tree_leaves(arguments)):
            return function(*arguments)
        return tree_map(wrapped, function(*tree_map(unwrapped, arguments)))

    return call


join = torch.distributed.init_process_group


def init_process_group(backend, *arguments, **named):
    """Join a group of CPUs in place of NCCL."""
    join("gloo", *arguments, **named)


move = torch.nn.Module.to


def move_once(module, *args, **kwargs):
    """Move a module, unless it is there already: torch cannot swap weights that are in use."""
    weights = [*module.parameters()]
    is_there = weights and all(isinstance(weight, CudaTensor) for weight in weights)
    to_gpu = len(args) == 1 and not isinstance(args[0], torch.dtype) and is_cuda(args[0])
    return module if is_there and to_gpu else move(module, *args, **kwargs)


empty = torch.nn.Module.to_empty


def replace_weights(module, **named):
    """Replace weights by empty ones, as without an emulation: fake tensors cannot be swapped."""
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        return empty(module, **named)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(True)


class Idle:
    """A stream or an event, which does nothing."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


PROPERTIES = SimpleNamespace(major=9, minor=0, total_memory=MEMORY, multi_processor_count=132)
# Functions of torch.cuda.
OF_CUDA = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda *_: None,
    "synchronize": lambda *_: None,
    "empty_cache": lambda: None,
    "max_memory_allocated": lambda *_: 1,
    "memory_allocated": lambda *_: 1,
    "memory_reserved": lambda *_: 1,
    "mem_get_info": lambda *_: (MEMORY, MEMORY),
    "get_device_name": lambda *_: "an emulated GPU",
    "get_device_capability": lambda *_: (PROPERTIES.major, PROPERTIES.minor),
    "get_device_properties": lambda *_: PROPERTIES,
    "default_generators": (torch.Generator(),),
    "get_sync_debug_mode": lambda: counts.mode,
    "set_sync_debug_mode": lambda mode: setattr(counts, "mode", mode),
    # DeepSpeed calls these.
    **dict.fromkeys(("Stream", "Event", "current_stream", "default_stream", "stream"), Idle),
    **dict.fromkeys(("max_memory_reserved", "memory_stats"), lambda *_: 1),
    "reset_peak_memory_stats": lambda *_: None,
}
REPLACED = (
    *((torch.cuda, name, value) for name, value in OF_CUDA.items()),
    (torch.cuda.random, "current_device", OF_CUDA["current_device"]),
    *((nvtx, name, lambda *_: 0) for name in ("range_push", "range_pop")),
    (torch.Tensor, "pin_memory", pin_memory),
    (torch.nn.Module, "to", move_once),
    (torch.nn.Module, "to_empty", replace_weights),
    (torch.backends.cuda, "enable_cudnn_sdp", lambda *_: None),
    (torch.nn.functional, "scaled_dot_product_attention", attention),
    (attention_module, "varlen_attn", varlen_attention),
    *(
        (attention_module, name, on_inner_tensors(getattr(attention_module, name)))
        for name in ("flash_forward", "flash_backward")
    ),
    (torch.distributed, "init_process_group", init_process_group),
)


@contextlib.contextmanager
def emulation():
    """Context in which `cuda` is an emulated device; yields its counts."""
    global counts
    counts = Counts()
    torch.__future__.set_swap_module_params_on_conversion(True)
    # Otherwise torch.tensor would copy its numbers past the dispatcher.
    torch._C._set_only_lift_cpu_tensors(True)
    with contextlib.ExitStack() as stack:
        for owner, name, value in REPLACED:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(Mode())
        yield counts


@contextlib.contextmanager
def rehearsal():
    """Context of an emulation without captured graphs and compiled layers."""
    with (
        mock.patch.object(FixedDecoder, "run_graph", FixedDecoder.sample),
        mock.patch.object(forward, "compile_layers", lambda model: None),
        mock.patch.object(forward, "compiled", lambda function: function),
        emulation() as counts,
    ):
        yield counts
