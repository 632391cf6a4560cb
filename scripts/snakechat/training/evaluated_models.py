"""Models that a job evaluates or samples from, without training them.

With ZeRO 3, the processes of the job partition the weights, so that a model need not fit into one
of them. Each process evaluates its share of the rows, and all get all results.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, Scorer
from snakechat.modeling.loading import load_causal, load_scorer
from snakechat.modeling.model_check import check_model
from snakechat.modeling.models import choose_device
from snakechat.training.engine import FrozenModel, M, make_frozen
from snakechat.training.zero_stages import evaluates_partitioned
from snakechat.workflow.distributed import world_size
from snakechat.workflow.placement import Placement


def start_evaluation(placement: Placement, dtype: str) -> torch.device:
    """Return the device of this process, which joins the process group if the job has one.

    dtype: That of the models.
    """
    if world_size() == 1 and not evaluates_partitioned(placement, dtype):
        return choose_device(placement)
    # It imports DeepSpeed, which takes seconds.
    from snakechat.training.process_group import init_process_group

    return init_process_group(placement)


@contextlib.contextmanager
def loaded_policy(
    folder: Path,
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    placement: Placement,
    examples: Examples,
    samples: bool = False,
) -> Iterator[FrozenModel[Policy]]:
    """Load a language model within the context.

    Args:
        examples, samples: As for check_model.

    Raises:
        InputError: As load_causal and check_model do.
    """
    deferred = evaluates_partitioned(placement, dtype)
    policy = Policy(load_causal(folder, dtype, tokenizer, deferred))
    with contextlib.closing(freeze(policy, dtype, placement)) as frozen:
        # Its weights are then freed at the end of the context.
        del policy
        check_model(frozen.module, examples, frozen.sampling, samples)
        yield frozen


@contextlib.contextmanager
def loaded_scorer(
    folder: Path,
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    placement: Placement,
    examples: Examples,
) -> Iterator[FrozenModel[Scorer]]:
    """Load a reward model within the context.

    Raises:
        InputError: As load_scorer and check_model do.
    """
    frozen = load_frozen_scorer(folder, dtype, tokenizer, placement, examples)
    with contextlib.closing(frozen):
        yield frozen


def load_frozen_scorer(
    folder: Path,
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    placement: Placement,
    examples: Examples,
) -> FrozenModel[Scorer]:
    """Load a reward model; see loaded_scorer."""
    deferred = evaluates_partitioned(placement, dtype)
    scorer = Scorer(load_scorer(folder, dtype, tokenizer, deferred=deferred))
    frozen = freeze(scorer, dtype, placement)
    check_model(frozen.module, examples, frozen.sampling)
    return frozen


def freeze(module: M, dtype: str, placement: Placement) -> FrozenModel[M]:
    """Return a module on the device of this process, or partitioned over all of them."""
    if evaluates_partitioned(placement, dtype):
        return make_frozen(module, dtype, placement, placement.offload == "parameters")
    return FrozenModel(module, choose_device(placement), offload=False)
