"""ZeRO stages: which one a run has. Apart from the engine, so that pages need no torch."""

# Too low for a dtype: stage 1 would add up gradients in 16 bits, stage 0 knows no loss scale.
TOO_LOW = {"fp32": (), "bf16": (1,), "fp16": (0, 1)}


def stage_used(zero_stage, dtype):
    """The ZeRO stage of a run that asks for one."""
    return 2 if zero_stage in TOO_LOW[dtype] else zero_stage
