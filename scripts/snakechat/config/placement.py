"""Placement: where and how a job runs. It is never part of what a result is made from."""

from dataclasses import dataclass
from typing import Annotated, Literal

from snakechat.config.common import Count, EnvironmentVariable, Keyword, NonNegativeInt

ZeroStage = Literal[0, 1, 2, 3]
Offload = Literal["none", "optimizer", "parameters"]
# What `micro_batch_tokens: auto` stands for in jobs that train no model.
MICRO_BATCH_TOKENS = 8192
# As transformers' argument of this name.
AttnImplementation = Literal["auto", "sdpa", "varlen", "flex"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Hardware of a job, and how the job uses it.

    threads, mem_mb and runtime (minutes) count on each node. snakechat.planning.stage_choice
    replaces `auto`. Those with defaults are optional: snakechat.modeling.acceleration has the
    defaults for each device, and scripts/launch.py sets environment.
    """

    nodes: Count
    gpus_per_node: NonNegativeInt
    zero_stage: Literal["auto", 0, 1, 2, 3]
    offload: Offload
    activation_checkpointing: Literal["auto", True, False]
    micro_batch_tokens: Literal["auto"] | Count
    threads: Count
    mem_mb: Count
    runtime: Count
    generate_tokens: Count | None = None
    pad_to_multiple_of: Count | None = None
    prefetch: bool | None = None
    cuda_graphs: bool | None = None
    attn_implementation: AttnImplementation = "auto"
    compile: bool | None = None
    vllm_tensor_parallel_size: Count = 1
    environment: dict[EnvironmentVariable, str] | None = None


@dataclass(frozen=True, kw_only=True)
class RlhfPlacement(Placement):
    """Placement of a recipe of stage rlhf; critic_zero_stage defaults to zero_stage."""

    critic_zero_stage: ZeroStage | None = None
    offload_frozen: bool = False


def _if_offload(offload: Offload, stage: dict[str, int]) -> dict[str, dict[str, object]]:
    return {
        "if": {"properties": {"offload": {"const": offload}}},
        "then": {"properties": {"zero_stage": stage, "critic_zero_stage": stage}},
    }


# DeepSpeed offloads only what ZeRO partitions.
OFFLOAD_NEEDS_ZERO = Keyword(
    "allOf", [_if_offload("optimizer", {"minimum": 1}), _if_offload("parameters", {"const": 3})]
)
CompletePlacement = Annotated[Placement, OFFLOAD_NEEDS_ZERO]
CompleteRlhfPlacement = Annotated[RlhfPlacement, OFFLOAD_NEEDS_ZERO]
