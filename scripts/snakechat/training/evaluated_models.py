"""Models that a job evaluates or samples from, without training them.

With ZeRO 3, the processes of the job partition the weights, so that a model need not fit into one
of them. Each process evaluates its share of the rows, and all get all results.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, Scorer
from snakechat.modeling.loading import load_causal, load_scorer
from snakechat.modeling.model_check import check_model
from snakechat.modeling.models import check_sequence_length, choose_device
from snakechat.training.process_group import init_process_group
from snakechat.training.zero_stages import evaluates_partitioned
from snakechat.workflow.distributed import world_size
from snakechat.workflow.placement import Placement

M = TypeVar("M", bound=nn.Module)
P = TypeVar("P", Policy, Scorer)


def start_evaluation(placement: Placement, dtype: str) -> torch.device:
    """Return the device of this process, which joins the process group if the job has one.

    dtype: Data type of the models.
    """
    if world_size() == 1 and not evaluates_partitioned(placement, dtype):
        return choose_device(placement)
    return init_process_group(placement)


class FrozenModel(AbstractContextManager["FrozenModel[M]"], Generic[M]):
    """A module that is evaluated and never trained; a context closes it at its end.

    offload: Keep the module in CPU memory while it is not in use.
    """

    def __init__(self, module: M, device: torch.device, offload: bool) -> None:
        self.module = module.requires_grad_(False).eval()
        self.device = device
        # The weights in CPU memory, from which they are copied to the device for each use. Pinned
        # memory is copied without a pass through other memory.
        self.offloaded: list[tuple[torch.Tensor, torch.Tensor]] = []
        if not (offload and device.type == "cuda"):
            self.module.to(device)
            return
        for tensor in (*module.parameters(), *module.buffers()):
            kept = tensor.data.cpu().pin_memory()
            self.offloaded.append((tensor, kept))
            tensor.data = kept

    @contextlib.contextmanager
    def on_device(self) -> Iterator[M]:
        """Yield the module, on its device within the context."""
        for tensor, kept in self.offloaded:
            tensor.data = kept.to(self.device, non_blocking=True)
        yield self.module
        for tensor, kept in self.offloaded:
            tensor.data = kept

    def sampling(self) -> AbstractContextManager[None]:
        """Return a context in which this process may call the model any number of times.

        All processes enter the context, and leave it together.
        """
        return contextlib.nullcontext()

    def gathered(self, weights: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
        """Return a context in which every process has the whole of some weights."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Free the weights. The model cannot be used any more."""
        self.offloaded.clear()
        del self.module

    def __exit__(self, *_: object) -> None:
        self.close()


def make_frozen(module: M, dtype: str, placement: Placement, offload: bool) -> FrozenModel[M]:
    """Return a module that is evaluated and never trained; with ZeRO 3, it is partitioned.

    Args:
        module: The module, on any device; its weights may be deferred at ZeRO 3.
        dtype: The dtype of the recipe.
        offload: Keep the weights in CPU memory while they are not in use.
    """
    if evaluates_partitioned(placement, dtype):
        # That module imports this one.
        from snakechat.training.deepspeed_engine import PartitionedModel

        return PartitionedModel(module, dtype, offload)
    return FrozenModel(module, choose_device(placement), offload)


def load_frozen(
    wrapper: type[P],
    folder: Path,
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    placement: Placement,
    examples: Examples | None,
    samples: bool = False,
    new_head: bool = False,
    offload: bool | None = None,
    longest: int = 0,
) -> FrozenModel[P]:
    """Return a model that is evaluated and never trained; it is closed at the end of a context.

    Args:
        wrapper: Policy for a language model, Scorer for a reward model.
        examples, samples: As for check_model; None for a model that was checked already.
        new_head: As for load_scorer.
        offload: As for make_frozen; defaults to what the placement's `offload` says.
        longest: Tokens of the longest sequence, if they are known.

    Raises:
        InputError: As load_causal, load_scorer, check_sequence_length and check_model do.
    """
    partitioned = evaluates_partitioned(placement, dtype)
    if offload is None:
        offload = partitioned and placement.offload == "parameters"
    if wrapper is Policy:
        model = load_causal(folder, dtype, tokenizer, partitioned)
    else:
        model = load_scorer(folder, dtype, tokenizer, new_head, partitioned)
    check_sequence_length(model, longest)
    frozen = make_frozen(wrapper(model), dtype, placement, offload)
    if examples is not None:
        with frozen.on_device() as module:
            check_model(module, examples, frozen.sampling, samples)
    return frozen
