"""The workload of each kind of job, from its spec."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from snakechat.planning import inference_workloads as inference
from snakechat.planning import training_workloads as training
from snakechat.planning.activation_memory import POLICY, SCORE, SFT
from snakechat.planning.job_sizes import JobSizes
from snakechat.planning.memory import USABLE_MEMORY, peak_memory
from snakechat.planning.plan import Plan
from snakechat.planning.workload import Workload
from snakechat.workflow.placement import Placement

TRAININGS: dict[str, Callable[[JobSizes], Workload]] = {
    "train_sft": partial(training.train_on_rows, loss=SFT),
    "train_reward": partial(training.train_on_rows, loss=SCORE),
    "train_dpo": partial(training.train_on_rows, loss=POLICY),
    "train_rlhf": training.train_rlhf,
}
WORKLOADS: dict[str, Callable[[JobSizes], Workload | None]] = {
    **TRAININGS,
    "generate_responses": inference.generate_responses,
    "score_responses": inference.score_responses,
    "compute_teacher": inference.compute_teacher,
    "compute_reference": inference.compute_reference,
    "evaluate_sft": inference.evaluate_sft,
    "evaluate_reward": inference.evaluate_reward,
    "evaluate_dpo": inference.evaluate_dpo,
    "evaluate_rlhf": inference.evaluate_rlhf,
    "prompt_eval": inference.prompt_eval,
    "rw_eval": inference.rw_eval,
}


def job_workload(
    spec: Mapping[str, Any], placement: Placement, plan: Plan, gpu_memory: float = 0
) -> Workload | None:
    """Return the workload of a job; None if the job needs no GPU.

    gpu_memory: Bytes of a GPU; 0 on CPUs.

    Raises:
        InputError: The size of its model is unknown.
    """
    describe = WORKLOADS.get(spec["rule"])
    if describe is None:
        return None
    workload = describe(JobSizes(spec, placement, plan, gpu_memory))
    if workload and workload.generations and gpu_memory and placement.generate_tokens is None:
        _, memory = peak_memory(workload, placement, gpu_memory)
        if sum(memory.values()) > gpu_memory * USABLE_MEMORY:
            # A batch that samples is smaller where less memory is free.
            smallest = replace(placement, generate_tokens=placement.micro_batch_tokens)
            return describe(JobSizes(spec, smallest, plan, gpu_memory))
    return workload
