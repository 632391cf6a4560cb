"""Compiled decoder layers (regional compilation by torch.compile).

All layers of a model share what is compiled for one of them. Whole models would compile longer, and
again for each model.
"""

import functools
import importlib.util
import inspect
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from transformers import Cache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

# Versions of a layer for different kinds of shapes, layers and models. torch runs the layers
# without compilation beyond this number.
MAX_VERSIONS = 64
# Any of these compiles what torch generates.
COMPILERS = ("gcc", "g++", "clang")


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Compile the forward passes of a model's decoder layers, in place.

    Names of weights do not change, and adapters may be added before. With a key-value cache, layers
    run without compilation: it grows by a token in each call.

    Args:
        backend: Of torch.compile.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            cast(Any, layer).forward = compiled_without_cache(layer.forward, backend)


def compiled_without_cache(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Return a forward pass that is compiled for calls without a key-value cache."""
    compiled = compile_up_to(MAX_VERSIONS, forward, backend=backend)

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        has_cache = any(isinstance(value, Cache) for value in (*args, *kwargs.values()))
        return (forward if has_cache else compiled)(*args, **kwargs)

    return call


def compile_up_to(max_versions: int, function: Callable[..., Any], **options: Any) -> Any:
    """Return a function that torch compiles for at most this number of kinds of arguments.

    Args:
        options: Arguments of torch.compile.
    """
    # Also torch's annotations lack the limit.
    compile_function = cast(Any, torch.compile)
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return compile_function(function, recompile_limit=max_versions, **options)
    # torch 2.11 has no limit of one function, but one of the process.
    config = cast(Any, torch.compiler.config)
    config.recompile_limit = max(config.recompile_limit, max_versions)
    return compile_function(function, **options)


def can_compile() -> bool:
    """Return whether layers can be compiled for a GPU: with a C compiler and Python's headers."""
    return (
        any(map(shutil.which, (*COMPILERS, os.environ.get("CC", ""))))
        and Path(sysconfig.get_path("include"), "Python.h").exists()
        and importlib.util.find_spec("triton") is not None
    )
