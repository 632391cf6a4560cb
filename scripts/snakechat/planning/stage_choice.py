"""The placement that scripts/estimate.py assumes where a placement has `auto`.

It is the first rung of the ladder (snakechat/training/rungs.py) that fits by the estimate of
memory. A training tries the rungs and estimates nothing.
"""

from collections.abc import Mapping
from typing import Any

from snakechat.jobs.plan import Plan
from snakechat.planning.job_workloads import TRAININGS, job_workload
from snakechat.planning.memory import GIB, USABLE_MEMORY, peak_memory
from snakechat.training.rungs import is_open, possible_rungs
from snakechat.workflow.placement import Placement


def assumed_placement(
    spec: Mapping[str, Any], placement: Placement, plan: Plan, gpu_memory: float
) -> tuple[Placement, str]:
    """Return the placement that `auto` stands for in an estimate, and why.

    Jobs that train no model have no such keys: there, `auto` does not partition models.

    Raises:
        InputError: The size of a model is unknown.
    """
    if spec["rule"] not in TRAININGS or not is_open(placement):
        return placement, ""
    for rung in possible_rungs(placement, spec["settings"]["dtype"]):
        chosen = rung.of(placement)
        if not placement.gpus_per_node:
            return chosen, ""
        workload = job_workload(spec, chosen, plan, gpu_memory)
        assert workload
        needed = sum(peak_memory(workload, chosen, gpu_memory)[1].values())
        if needed <= USABLE_MEMORY * gpu_memory:
            break
    fits = "" if needed <= USABLE_MEMORY * gpu_memory else "does not fit, "
    return chosen, f"{rung}: {fits}{needed / GIB:.1f} of {gpu_memory / GIB:.1f} GiB"
