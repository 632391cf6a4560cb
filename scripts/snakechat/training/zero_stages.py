"""The ZeRO stage of a run. Apart from the engine, so that pages and planning need no torch."""

from snakechat.workflow.placement import Placement

# Stages that cannot train in a dtype: stage 1 accumulates gradients in 16 bits, stage 0 has no loss
# scaling.
UNSUPPORTED_STAGES: dict[str, tuple[int, ...]] = {"fp32": (), "bf16": (1,), "fp16": (0, 1)}


def stage_used(zero_stage: int, dtype: str) -> int:
    """Return the ZeRO stage that a run with a requested stage uses: 2 if it is unsupported."""
    return 2 if zero_stage in UNSUPPORTED_STAGES[dtype] else zero_stage


def training_bytes(stage: int, processes: int, dtype: str = "fp32") -> float:
    """Return the bytes of a process per trained weight.

    Rajbhandari et al. 2020 (ZeRO), section 3.1: 2 bytes of a weight and 2 of its gradient in 16
    bits, 12 of its fp32 value and the two moments of Adam. From stage 1 on, the processes divide
    the last 12; from stage 2 on the gradients too; at stage 3 all. In fp32 it is as much. Stage 0
    takes 2 more in 16 bits: Engine accumulates gradients in fp32.
    """
    if stage == 0:
        return 16 if dtype == "fp32" else 18
    whole = {1: 4, 2: 2, 3: 0}[stage]
    return whole + (16 - whole) / processes


def is_partitioned(placement: Placement, dtype: str) -> bool:
    """Return whether the processes partition the weights of a model (ZeRO 3)."""
    return stage_used(placement.zero_stage, dtype) == 3


def evaluates_partitioned(placement: Placement, dtype: str) -> bool:
    """Return whether a job that trains no model partitions the weights of those that it evaluates.

    A process that is alone and keeps them on its device has nothing to gain.
    """
    several = placement.nodes > 1 or placement.gpus_per_node > 1
    return is_partitioned(placement, dtype) and (several or placement.offload == "parameters")


# Largest fraction of a GPU's memory that the whole weights of a model may take while it samples.
MAX_WHOLE_WEIGHTS = 1 / 3


def samples_whole(weight_bytes: float, gpu_memory: float) -> bool:
    """Return whether each process gathers the weights of a partitioned model to sample.

    Otherwise the processes gather one layer at a time, for each token: this takes longer, and no
    memory. The results are the same. On CPUs, gpu_memory is 0.
    """
    return weight_bytes <= MAX_WHOLE_WEIGHTS * gpu_memory
