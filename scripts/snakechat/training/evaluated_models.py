"""Models that a job evaluates or samples from, without training them.

With ZeRO 3, the processes of the job partition the weights, so that a model need not fit into one
of them. Each process evaluates its share of the rows, and all get all results.
"""

from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, Scorer
from snakechat.modeling.loading import load_causal, load_scorer
from snakechat.modeling.model_check import check_model
from snakechat.modeling.models import choose_device
from snakechat.training.engine import FrozenModel, make_frozen
from snakechat.training.zero_stages import evaluates_partitioned
from snakechat.workflow.distributed import world_size
from snakechat.workflow.placement import Placement

P = TypeVar("P", Policy, Scorer)


def start_evaluation(placement: Placement, dtype: str) -> torch.device:
    """Return the device of this process, which joins the process group if the job has one.

    dtype: That of the models.
    """
    if world_size() == 1 and not evaluates_partitioned(placement, dtype):
        return choose_device(placement)
    # It imports DeepSpeed, which takes seconds.
    from snakechat.training.process_group import init_process_group

    return init_process_group(placement)


def loaded_policy(
    folder: Path,
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    placement: Placement,
    examples: Examples,
    samples: bool = False,
) -> FrozenModel[Policy]:
    """Return a language model, which is closed at the end of a context.

    Args:
        examples, samples: As for check_model.

    Raises:
        InputError: As load_causal and check_model do.
    """
    deferred = evaluates_partitioned(placement, dtype)
    model = load_causal(folder, dtype, tokenizer, deferred)
    return _checked(Policy(model), dtype, placement, examples, samples)


def loaded_scorer(
    folder: Path,
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    placement: Placement,
    examples: Examples,
    new_head: bool = False,
) -> FrozenModel[Scorer]:
    """Return a reward model, which is closed at the end of a context.

    new_head: As for load_scorer.

    Raises:
        InputError: As load_scorer and check_model do.
    """
    deferred = evaluates_partitioned(placement, dtype)
    model = load_scorer(folder, dtype, tokenizer, new_head, deferred)
    return _checked(Scorer(model), dtype, placement, examples)


def _checked(
    module: P, dtype: str, placement: Placement, examples: Examples, samples: bool = False
) -> FrozenModel[P]:
    """Return a module on the device of this process, or partitioned over all of them."""
    if evaluates_partitioned(placement, dtype):
        frozen = make_frozen(module, dtype, placement, placement.offload == "parameters")
    else:
        frozen = FrozenModel(module, choose_device(placement), offload=False)
    check_model(frozen.module, examples, frozen.sampling, samples)
    return frozen
