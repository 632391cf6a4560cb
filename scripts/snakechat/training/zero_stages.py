"""The ZeRO stage of a run. Apart from the engine, so that pages and planning need no torch."""

# Stages that cannot train in a dtype: stage 1 accumulates gradients in 16 bits, stage 0 has no loss
# scaling.
UNSUPPORTED_STAGES: dict[str, tuple[int, ...]] = {"fp32": (), "bf16": (1,), "fp16": (0, 1)}


def stage_used(zero_stage: int, dtype: str) -> int:
    """Return the ZeRO stage that a run with a requested stage uses: 2 if it is unsupported."""
    return 2 if zero_stage in UNSUPPORTED_STAGES[dtype] else zero_stage
