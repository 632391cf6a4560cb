"""What a planned job needs: GPU memory, time and disk, and settings with which it fits."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from snakechat.jobs.plan import Plan
from snakechat.jobs.stale_causes import job_name
from snakechat.modeling.vllm_sampler import GPU_MEMORY_FRACTION
from snakechat.planning.compute_time import Gpu, total_seconds
from snakechat.planning.job_workloads import job_workload
from snakechat.planning.memory import (
    GIB,
    USABLE_MEMORY,
    host_memory,
    peak_memory,
    result_bytes,
    vllm_minimum,
)
from snakechat.planning.model_configs import base_model_bytes
from snakechat.planning.stage_choice import assumed_placement
from snakechat.planning.workload import Workload
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import manifest_path, read_manifest
from snakechat.workflow.placement import Placement

# Changes of settings that are tried for a job that does not fit. Of several values of the same
# settings, the first one that fits is suggested. 128 is the rank of DeepSpeed-Chat.
ALTERNATIVES: tuple[dict[str, Any], ...] = (
    *({"vllm_tensor_parallel_size": number} for number in (2, 4, 8)),
    *({"micro_batch_tokens": number} for number in (4096, 2048, 1024)),
    {"activation_checkpointing": True},
    {"offload_frozen": True},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 2, "offload": "optimizer"},
    {"zero_stage": 3, "offload": "parameters"},
    {"zero_stage": 3, "gpus_per_node": 8},
    {"lora_rank": 128},
)


class JobEstimate:
    """The estimate of a job. Numbers are nan where they are unknown, or not needed without a GPU.

    Attributes:
        memory: Bytes of a GPU by component at peak memory; empty for a job without models.
        moment: The moment of peak memory.
        host_memory: Bytes of a node's CPU memory.
        seconds: Time of the whole job.
        disk: Bytes of the result.
        warnings: Why the job does not fit, and what would help.
        notes: Assumptions.
    """

    def __init__(self, path: str, plan: Plan, gpu: Gpu) -> None:
        self.spec, self.placement, _ = plan.jobs[path]
        self.plan, self.gpu, self.stale = plan, gpu, path in plan.stale
        self.workload: Workload | None = None
        self.moment, self.memory = "", dict[str, float]()
        self.host_memory = self.seconds = math.nan
        self.disk = math.nan if self.stale else size_on_disk(path)
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.num_gpus = 0
        try:
            self.placement, reason = assumed_placement(self.spec, self.placement, plan, gpu.memory)
            self.workload = self._workload(self.spec, self.placement)
            if self.workload:
                self._estimate(self.workload, reason)
            elif math.isnan(self.disk):
                self.disk = base_model_bytes(path, plan)
        except InputError as error:
            self.warnings.append(str(error))

    def __str__(self) -> str:
        return job_name(self.spec)

    def _gpu_memory(self, placement: Placement) -> float:
        """Return the bytes of a GPU; 0 if a placement has none."""
        return self.gpu.memory if placement.gpus_per_node else 0

    def _workload(self, spec: Mapping[str, Any], placement: Placement) -> Workload | None:
        """Return the workload of the job with a spec and a placement; None if it needs no GPU."""
        return job_workload(spec, placement, self.plan, self._gpu_memory(placement))

    def _estimate(self, workload: Workload, reason: str) -> None:
        """Set the attributes of a job that runs models.

        reason: Why the ZeRO stage was chosen; empty if it was not.
        """
        placement = self.placement
        self.num_gpus = placement.nodes * placement.gpus_per_node
        self.moment, self.memory = peak_memory(workload, placement, self._gpu_memory(placement))
        self.host_memory = host_memory(workload, placement)
        if self.num_gpus:
            self.seconds = total_seconds(workload, self.gpu, self.num_gpus)
        if self.stale:
            self.notes = [*([reason] if reason else []), *workload.notes]
            self.disk = result_bytes(workload, self.spec["settings"].get("save_dtype"))
            self.warnings = [*self._memory_warnings(workload)]

    def _memory_warnings(self, workload: Workload) -> Iterator[str]:
        """Yield what a GPU or a node lacks, with changed settings that help a GPU."""
        if not self.fits():
            changes: dict[tuple[str, ...], str] = {}
            for change in ALTERNATIVES:
                if tuple(change) not in changes and self.fits(**change):
                    changes[tuple(change)] = format_settings(change)
            advice = "nothing that was tried helps: use larger GPUs or a smaller model"
            if changes:
                advice = f"fits with {' | '.join(changes.values())}"
            yield f"does not fit: {self._lack_of_memory(workload)}; {advice}"
        if self.host_memory > self.placement.mem_mb << 20:
            yield (
                f"needs {format_bytes(self.host_memory)} of CPU memory on each node, mem_mb is"
                f" {self.placement.mem_mb}"
            )

    def _lack_of_memory(self, workload: Workload) -> str:
        """Return what a GPU needs and what it has."""
        if not self._vllm_fits(workload):
            return (
                f"vllm needs {format_bytes(vllm_minimum(workload.generations[0]))} and uses"
                f" {GPU_MEMORY_FRACTION:.0%} of a GPU of {format_bytes(self.gpu.memory)}"
            )
        largest = max(self.memory, key=self.memory.__getitem__)
        return (
            f"{format_bytes(sum(self.memory.values()))} at {self.moment} ({largest}:"
            f" {format_bytes(self.memory[largest])}), {'a GPU' if self.num_gpus else 'mem_mb'} has"
            f" {format_bytes(self._memory_limit())}"
        )

    def _memory_limit(self) -> float:
        """Return the bytes that the tensors of a process may occupy."""
        if self.num_gpus == 0:
            return self.placement.mem_mb << 20
        return self.gpu.memory * USABLE_MEMORY

    def _vllm_fits(self, workload: Workload) -> bool:
        """Return whether vLLM, if it samples, has memory for the weights and a response."""
        generations = workload.generations
        if not generations or not generations[0].vllm_ranks:
            return True
        return vllm_minimum(generations[0]) <= GPU_MEMORY_FRACTION * self.gpu.memory

    def fits(self, lora_rank: int = 0, **placement: Any) -> bool:
        """Return whether the job fits into memory, with changed settings if any."""
        settings = self.spec["settings"]
        if lora_rank:
            settings = settings | {"lora_rank": lora_rank}
        changed = replace(self.placement, **placement)
        if changed.gpus_per_node % changed.vllm_tensor_parallel_size:
            return False
        workload = self._workload(self.spec | {"settings": settings}, changed)
        assert workload
        _, memory = peak_memory(workload, changed, self._gpu_memory(changed))
        return sum(memory.values()) <= self._memory_limit() and self._vllm_fits(workload)


def size_on_disk(path: str) -> float:
    """Return the bytes of an existing result according to its manifest, nan without one."""
    manifest = read_manifest(manifest_path(path))
    if manifest is None:
        return math.nan
    return sum(entry["size"] for entry in manifest["files"].values())


def format_bytes(number: float) -> str:
    """Format bytes in GiB, small numbers in MiB."""
    return f"{number / GIB:,.1f} GiB" if number >= GIB / 10 else f"{number / (1 << 20):,.1f} MiB"


def format_settings(settings: Mapping[str, Any]) -> str:
    """Format settings as in config.yaml."""
    return ", ".join(f"{name}: {str(value).lower()}" for name, value in settings.items())
