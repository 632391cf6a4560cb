"""ZeRO stage, activation checkpointing, micro-batches and compilation that a placement leaves open.

The first three are the first ones, in the order of CHOICES and SMALLER_TOKENS, that fit on the
GPUs. A training program and scripts/estimate.py choose by the same estimate of memory.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from snakechat.jobs.plan import Plan, PlannedJob
from snakechat.modeling.compilation import can_compile
from snakechat.modeling.model_check import MAX_FP32_WEIGHTS
from snakechat.modeling.models import choose_device
from snakechat.planning.activation_memory import measure_size
from snakechat.planning.compute_time import FLOPS_UTILIZATION
from snakechat.planning.flops import peak_flops
from snakechat.planning.job_workloads import TRAININGS, job_workload
from snakechat.planning.memory import GIB, USABLE_MEMORY, num_processes, peak_memory
from snakechat.planning.token_counts import FIELDS
from snakechat.planning.workload import Workload
from snakechat.training.checkpointing import saved_zero_stage
from snakechat.training.zero_stages import stage_used
from snakechat.workflow.distributed import all_reduce_max, broadcast_from_first, rank
from snakechat.workflow.job import Job
from snakechat.workflow.placement import SERIAL, Placement

AUTO = "auto"
# A model is compiled by default if it has more weights, and is trained for longer, than these. A
# smaller model is compared with transformers in fp32 (modeling/model_check.py), for which it would
# be compiled again. Compiling takes up to a few minutes.
COMPILED_WEIGHTS, COMPILED_SECONDS = MAX_FP32_WEIGHTS, 600
KEYS = ("zero_stage", "activation_checkpointing", "micro_batch_tokens")
# Values of micro_batch_tokens in the order in which they are tried: smaller ones before activations
# are checkpointed or more is partitioned.
SMALLER_TOKENS = (SERIAL.micro_batch_tokens, 4096, 2048)
# A few percent faster; taken if they need at most this fraction of the GPU's memory.
LARGER_TOKENS, MEMORY_OF_LARGER = (16384, 32768), 0.7
# Values of the first two KEYS, the fastest first. Checkpointing computes each forward pass a second
# time; stage 3 gathers all weights in each pass, and to sample.
CHOICES = sorted(
    product(range(4), (False, True)), key=lambda pair: (pair[0] == 3, pair[1], pair[0])
)


def choose_stage(job: Job[Any]) -> None:
    """Complete the placement of a training for the GPUs of its processes, and apply it.

    A run that resumes keeps the ZeRO stage of its checkpoint.
    """
    placement, index, tokens, compiles = job.placement, 0, 0, False
    on_gpu = placement.gpus_per_node > 0
    may_compile = on_gpu and placement.compile is None and not job.spec.get("deterministic")
    if not (_is_open(placement) or may_compile):
        return
    gpu_memory = torch.cuda.mem_get_info()[1] if on_gpu else 0
    # GPUs may differ: the smallest one decides.
    gpu_memory = -all_reduce_max(-gpu_memory)
    if rank() == 0:
        plan = plan_of_inputs(job)
        saved = saved_zero_stage(job.states) if is_auto(placement.zero_stage) else None
        known = placement if saved is None else replace(placement, zero_stage=saved)
        chosen, reason = determine_stage(job.spec, known, plan, gpu_memory)
        known = replace(known, **chosen)
        index = CHOICES.index((known.zero_stage, known.activation_checkpointing))
        tokens = known.micro_batch_tokens
        if reason:
            print(reason, flush=True)
        peak = peak_flops(torch.cuda.get_device_name()) if may_compile and can_compile() else None
        if peak:
            workload = job_workload(job.spec, known, plan, gpu_memory)
            assert workload
            compiles = is_worth_compiling(workload, num_processes(known) * peak)
        if compiles:
            print(f"compile: true: the training takes more than {COMPILED_SECONDS // 60} minutes")
    chosen_pair = CHOICES[broadcast_from_first(index)]
    chosen = dict(zip(KEYS, (*chosen_pair, broadcast_from_first(tokens)), strict=True))
    job.placement = replace(placement, **chosen)
    if broadcast_from_first(compiles):
        job.placement = replace(job.placement, compile=True)
        choose_device(job.placement)


def is_worth_compiling(workload: Workload, peak: float) -> bool:
    """Return whether a training is compiled by default.

    Args:
        peak: Operations per second that all GPUs reach at most.
    """
    stages = [entry.stage for entry in workload.trained]
    weights = max(measure_size(entry.model).weights for entry in workload.trained)
    seconds = workload.flops / (peak * FLOPS_UTILIZATION)
    # Stage 3 runs no compiled layers.
    return 3 not in stages and weights > COMPILED_WEIGHTS and seconds > COMPILED_SECONDS


def determine_stage(
    spec: Mapping[str, Any], placement: Placement, plan: Plan, gpu_memory: float
) -> tuple[dict[str, Any], str]:
    """Return the keys of a placement that `auto` stands for, and why they have their values.

    Jobs that train no model have no such keys: there, `auto` does not partition models.

    Raises:
        InputError: The size of a model is unknown.
    """
    if spec["rule"] not in TRAININGS or not _is_open(placement):
        return {}, ""

    def fraction_needed(chosen: dict[str, Any]) -> float:
        changed = replace(placement, **chosen)
        workload = job_workload(spec, changed, plan, gpu_memory)
        assert workload
        return sum(peak_memory(workload, changed, gpu_memory)[1].values()) / gpu_memory

    given: object = placement.micro_batch_tokens
    choices = [
        dict(zip(KEYS, (*pair, tokens), strict=True))
        for pair in possible_choices(placement, spec["settings"]["dtype"])
        for tokens in (SMALLER_TOKENS if given == AUTO else (given,))
    ]
    if not placement.gpus_per_node:
        return choices[0], ""
    for chosen in choices:
        needed = fraction_needed(chosen)
        if needed <= USABLE_MEMORY:
            break
    for tokens in LARGER_TOKENS if chosen["micro_batch_tokens"] == SMALLER_TOKENS[0] else ():
        larger = {**chosen, "micro_batch_tokens": tokens}
        if given != AUTO or (of_larger := fraction_needed(larger)) > MEMORY_OF_LARGER:
            break
        chosen, needed = larger, of_larger
    return chosen, (
        f"zero_stage: {chosen['zero_stage']}"
        f" {'with' if chosen['activation_checkpointing'] else 'without'} activation_checkpointing,"
        f" micro_batch_tokens: {chosen['micro_batch_tokens']}:"
        f" {'' if needed <= USABLE_MEMORY else 'does not fit, '}"
        f"{needed * gpu_memory / GIB:.1f} of {gpu_memory / GIB:.1f} GiB"
    )


def possible_choices(placement: Placement, dtype: str) -> list[tuple[int, bool]]:
    """Return the CHOICES that a placement allows, in their order. At least one is among them."""
    stages = [stage for stage in range(4) if stage_used(stage, dtype) == stage]
    if placement.offload != "none":
        # DeepSpeed offloads only what ZeRO partitions.
        stages = [stage for stage in stages if stage > 0]
    if placement.compile:
        # Stage 3 runs no compiled layers.
        stages.remove(3)
    if num_processes(placement) == 1:
        # There is nothing to partition.
        del stages[1:]
    if not is_auto(placement.zero_stage):
        stages = [placement.zero_stage]
    given: object = placement.activation_checkpointing
    return [
        (stage, recomputes)
        for stage, recomputes in CHOICES
        if stage in stages and given in (AUTO, recomputes)
    ]


def _is_open(placement: Placement) -> bool:
    """Return whether a placement has `auto` for a key."""
    return any(is_auto(getattr(placement, key)) for key in KEYS)


def is_auto(value: object) -> bool:
    """Return whether a key of a placement is still open."""
    return value == AUTO


def plan_of_inputs(job: Job[Any]) -> Plan:
    """Return a plan of the inputs of a job, which exist."""
    planned = {}
    for entry in job.spec["inputs"].values():
        # Any model's folder has a config, as a downloaded model has.
        rule = entry.get("rule")
        rule = rule if rule in FIELDS else "fetch_model"
        planned[entry["path"]] = PlannedJob({"rule": rule, "settings": {"hub": ""}})
    return Plan(planned, set())
