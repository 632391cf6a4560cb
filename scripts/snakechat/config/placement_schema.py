"""Constraints of the placements in the config."""

from typing import Annotated, Any

from snakechat.workflow.placement import Offload, Placement
from snakechat.workflow.value_types import Keyword, Without


def _if_offload(offload: Offload, stage: dict[str, int]) -> dict[str, dict[str, Any]]:
    return {
        "if": {"properties": {"offload": {"const": offload}}},
        "then": {"properties": {"zero_stage": stage, "critic_zero_stage": stage}},
    }


# DeepSpeed offloads only what ZeRO partitions.
OFFLOAD_NEEDS_ZERO = Keyword(
    "allOf", [_if_offload("optimizer", {"minimum": 1}), _if_offload("parameters", {"const": 3})]
)
RlhfPlacement = Annotated[Placement, OFFLOAD_NEEDS_ZERO]
# Only stage rlhf has a critic and frozen models.
OtherPlacement = Annotated[
    Placement, OFFLOAD_NEEDS_ZERO, Without(("critic_zero_stage", "offload_frozen"))
]
