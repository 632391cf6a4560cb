"""The work of a job with models: what it trains, evaluates and samples."""

import math
from typing import NamedTuple

from snakechat.planning.activation_memory import BatchShape, ModelSpec


class LoadedModel(NamedTuple):
    """A model, and the ZeRO stage with which the processes partition it."""

    model: ModelSpec
    stage: int


class Generation(NamedTuple):
    """Responses that a model generates, in batches of a shape.

    num_responses: Of all processes; nan if the number is unknown.
    shape: The largest batch.
    vllm_ranks: Processes of a vLLM engine that generates; 0 if the model itself does.
    is_captured: Whether a CUDA graph launches the kernels of a step; vLLM has its own.
    """

    model: ModelSpec
    num_responses: float
    shape: BatchShape
    vllm_ranks: int = 0
    is_captured: bool = True


class Workload(NamedTuple):
    """The work of a job.

    trained: Models that it trains, of RLHF the actor first.
    frozen: Models that it evaluates and does not train.
    largest: Its largest micro-batch.
    flops: Operations of forward and backward passes; nan if the number of rows is unknown.
    lora_flops: The part of flops that trains models with adapters.
    generations: Responses that it generates; the first ones in the largest batches.
    ema: Whether it keeps a moving average of the first trained model.
    one_at_a_time: Whether it has one of its models in memory at a time. Each of them generates,
        apart from reward models.
    notes: Assumptions, for the user.
    file_bytes: Bytes of its result, if it trains no model; nan if they are few or unknown.
    """

    trained: list[LoadedModel]
    frozen: list[ModelSpec]
    largest: BatchShape
    flops: float
    lora_flops: float = 0
    generations: tuple[Generation, ...] = ()
    ema: bool = False
    one_at_a_time: bool = False
    notes: tuple[str, ...] = ()
    file_bytes: float = math.nan
