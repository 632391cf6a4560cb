"""Placement and options: where and how a job runs. They are no part of what a result is made from.

Standard library only: the workflow imports this module while it plans.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal

from snakechat.workflow.manifest import STORE

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
    max_mem_mb: int | None = None
    slurm: dict[str, str] | None = None

    @property
    def num_processes(self) -> int:
        """Processes of a job: one for each GPU, or one on the CPU of each node."""
        return self.nodes * max(self.gpus_per_node, 1)


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
    return {key: value for key, value in vars(record).items() if value != defaults[key]}


def placement_values(placement: Placement) -> dict[str, Any]:
    """Return the values of a placement that differ from their defaults; none of SERIAL."""
    return {} if placement is SERIAL else changed_values(placement)


def placement_of(values: Mapping[str, Any]) -> Placement:
    """Return the placement with these values, and otherwise the values of SERIAL."""
    return replace(SERIAL, **values) if values else SERIAL


def parse_placement(text: str) -> Placement:
    """Return the placement with the values in a JSON text."""
    return placement_of(json.loads(text))


# --- options of a run -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Paths, addresses and limits of a run.

    Attributes:
        stores: Folders of the stores whose results are used. New ones go to the first.
        hermetic: Whether the kernel limits what the job reads and writes: auto, require or off.
        snakemake: The options of Snakemake with which the result is rebuilt.
        save_steps: Steps between two checkpoints.
        source: Folder of the external files of the job; empty if it has none.
        python: The interpreter of a command; empty if it is the build's, or none.
        licenses: The licences that the config declares, by the path of the import or the fetch.
        llm_judges: Where and how LLM judges are asked, by name.
        versions: Folders in the store of compared versions, by recipe and kind of result; of a
            training log, the file itself.
    """

    stores: list[str] = field(default_factory=lambda: [str(STORE)])
    hermetic: str = "auto"
    snakemake: list[str] = field(default_factory=list)
    save_steps: int = 1
    source: str = ""
    python: str = ""
    licenses: Mapping[str, str] = field(default_factory=dict)
    llm_judges: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    versions: Mapping[str, dict[str, str]] = field(default_factory=dict)


DEFAULTS = RunOptions()


def parse_options(text: str) -> RunOptions:
    """Return the options in a JSON text of the values that differ from their defaults."""
    return RunOptions(**json.loads(text))
