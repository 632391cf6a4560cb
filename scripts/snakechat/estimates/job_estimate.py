"""What a planned job needs: GPU memory, time and disk."""

import math
from collections.abc import Iterator

from snakechat.estimates.compute_time import WITHOUT_BF16, Gpu, total_seconds
from snakechat.estimates.memory import (
    GIB,
    USABLE_MEMORY,
    Workload,
    gathers_each_token,
    peak_memory,
    result_bytes,
    vllm_fits,
)
from snakechat.estimates.workloads import job_workload
from snakechat.jobs.plan import Plan
from snakechat.jobs.rules import RULES
from snakechat.jobs.stale_causes import job_name
from snakechat.modeling.vllm_sampler import GPU_MEMORY_FRACTION
from snakechat.training.rungs import is_open, possible_rungs
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import manifest_path, read_manifest
from snakechat.workflow.placement import Placement


class JobEstimate:
    """The estimate of a job. Numbers are nan where they are unknown, or not needed without a GPU.

    Where a placement has `auto`, it is that of the first rung (snakechat/training/rungs.py) that
    fits by the estimate of memory. A training tries the rungs, and estimates nothing.

    Attributes:
        memory: Bytes of a GPU by component at peak memory; empty for a job without models.
        moment: The moment of peak memory.
        seconds: Time of the whole job.
        disk: Bytes of the result.
        warnings: Why the job does not fit.
        notes: Assumptions.
    """

    def __init__(self, path: str, plan: Plan, gpu: Gpu, gpu_name: str = "") -> None:
        self.spec, self.placement, _ = plan.jobs[path]
        self._is_training = RULES[self.spec["rule"]].work == "training"
        self.plan, self.gpu, self.stale = plan, gpu, path in plan.stale
        self.workload: Workload | None = None
        self.moment, self.memory = "", dict[str, float]()
        self.seconds = math.nan
        self.disk = math.nan if self.stale else size_on_disk(path)
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.num_gpus = 0
        try:
            self._place()
        except InputError as error:
            self.warnings.append(str(error))
            return
        if not self.workload:
            return
        self.num_gpus = self.placement.nodes * self.placement.gpus_per_node
        if self.num_gpus:
            self.seconds = total_seconds(self.workload, gpu, self.num_gpus)
        if self.stale:
            self.notes += self.workload.notes
            self.disk = result_bytes(self.workload, self.spec["settings"].get("save_dtype"))
            self.warnings = [*self._lacks(self.workload)] if self.num_gpus else []
            if self.num_gpus and gpu_name in WITHOUT_BF16 and self._trains_in_bf16():
                self.warnings.append(f"{gpu_name} has no arithmetic in bf16: set dtype: fp16")

    def __str__(self) -> str:
        return job_name(self.spec)

    def _place(self) -> None:
        """Set the placement, its workload and its memory."""
        placements = [self.placement]
        has_choice = self._is_training and is_open(self.placement)
        if has_choice:
            rungs = possible_rungs(self.placement, self.spec["settings"]["dtype"])
            placements = [rung.of(self.placement) for rung in rungs]
        for placement in placements:
            self.placement = placement
            memory = self._gpu_memory(placement)
            self.workload = job_workload(self.spec, placement, self.plan, memory)
            if self.workload is None:
                return
            self.moment, self.memory = peak_memory(self.workload, placement, memory)
            if self._fits():
                break
        if has_choice and placement.gpus_per_node:
            self.notes.append(
                f"zero_stage: {placement.zero_stage}, activation_checkpointing:"
                f" {str(placement.activation_checkpointing).lower()}, micro_batch_tokens:"
                f" {placement.micro_batch_tokens}, if a training finds the same"
            )

    def _gpu_memory(self, placement: Placement) -> float:
        """Return the bytes of a GPU; 0 if a placement has none."""
        return self.gpu.memory if placement.gpus_per_node else 0

    def _fits(self) -> bool:
        """Return whether the tensors of a process fit into its GPU."""
        return sum(self.memory.values()) <= USABLE_MEMORY * self.gpu.memory

    def _trains_in_bf16(self) -> bool:
        return self._is_training and self.spec["settings"]["dtype"] == "bf16"

    def _lacks(self, workload: Workload) -> Iterator[str]:
        """Yield what a GPU lacks."""
        if not self._fits():
            largest = max(self.memory, key=self.memory.__getitem__)
            yield (
                f"does not fit: {format_bytes(sum(self.memory.values()))} at {self.moment}"
                f" ({largest}: {format_bytes(self.memory[largest])}), a GPU has"
                f" {format_bytes(USABLE_MEMORY * self.gpu.memory)}"
            )
        if not all(vllm_fits(each, self.gpu.memory) for each in workload.generations):
            yield (
                "does not fit: vllm needs more for weights and a response than the"
                f" {GPU_MEMORY_FRACTION:.0%} of a GPU that it uses: set vllm_tensor_parallel_size"
            )
        if gathers_each_token(workload, self.gpu.memory):
            yield (
                "each token gathers all weights from all GPUs, whose time is not counted: set"
                " generation_backend: vllm with vllm_tensor_parallel_size"
            )


def size_on_disk(path: str) -> float:
    """Return the bytes of an existing result according to its manifest, nan without one."""
    manifest = read_manifest(manifest_path(path))
    if manifest is None:
        return math.nan
    return sum(entry["size"] for entry in manifest["files"].values())


def format_bytes(number: float) -> str:
    """Format bytes in GiB, small numbers in MiB."""
    return f"{number / GIB:,.1f} GiB" if number >= GIB / 10 else f"{number / (1 << 20):,.1f} MiB"
