"""Placement: where and how a job runs. It is never part of what a result is made from.

Standard library only: the workflow imports this module while it plans.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal

ZeroStage = Literal[0, 1, 2, 3]
Offload = Literal["none", "optimizer", "parameters"]
# As transformers' argument of this name.
AttnImplementation = Literal["auto", "sdpa"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Hardware of a job, and how the job uses it.

    threads, mem_mb and runtime (minutes) count on each node. Before it trains, a program replaces
    `auto` (snakechat.training.rungs). Those with defaults are optional:
    snakechat.modeling.acceleration has the defaults for each device, scripts/launch.py sets
    environment, and critic_zero_stage defaults to zero_stage.
    """

    nodes: int
    gpus_per_node: int
    zero_stage: ZeroStage
    offload: Offload
    activation_checkpointing: bool
    micro_batch_tokens: int
    threads: int
    mem_mb: int
    runtime: int
    generate_tokens: int | None = None
    cuda_graphs: bool | None = None
    attn_implementation: AttnImplementation = "auto"
    compile: bool | None = None
    vllm_tensor_parallel_size: int = 1
    environment: dict[str, str] | None = None
    critic_zero_stage: ZeroStage | None = None
    offload_frozen: bool = False


# A job without models runs in one process on a CPU. Snakemake's defaults limit its memory and time.
SERIAL = Placement(
    nodes=1,
    gpus_per_node=0,
    zero_stage=0,
    offload="none",
    activation_checkpointing=False,
    micro_batch_tokens=8192,
    threads=1,
    mem_mb=0,
    runtime=0,
)


def changed_values(record: Any) -> dict[str, Any]:
    """Return the values of a dataclass that differ from their defaults, as JSON values."""
    defaults = {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in fields(record)
    }
    return {key: value for key, value in asdict(record).items() if value != defaults[key]}


def placement_values(placement: Placement) -> dict[str, Any]:
    """Return the values of a placement that differ from their defaults; none of SERIAL."""
    return {} if placement is SERIAL else changed_values(placement)


def placement_of(values: Mapping[str, Any]) -> Placement:
    """Return the placement with these values, and otherwise the values of SERIAL."""
    return replace(SERIAL, **values) if values else SERIAL


def parse_placement(text: str) -> Placement:
    """Return the placement with the values in a JSON text."""
    return placement_of(json.loads(text))
