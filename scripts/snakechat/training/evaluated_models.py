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
from snakechat.modeling.models import check_sequence_length, choose_device
from snakechat.training.engine import FrozenModel, make_frozen
from snakechat.training.process_group import init_process_group
from snakechat.training.zero_stages import evaluates_partitioned
from snakechat.workflow.distributed import world_size
from snakechat.workflow.placement import Placement

P = TypeVar("P", Policy, Scorer)


def start_evaluation(placement: Placement, dtype: str) -> torch.device:
    """Return the device of this process, which joins the process group if the job has one.

    dtype: Data type of the models.
    """
    if world_size() == 1 and not evaluates_partitioned(placement, dtype):
        return choose_device(placement)
    return init_process_group(placement)


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
        offload: Keep the weights in CPU memory while they are not in use; by default as the
            placement's `offload` says.
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
