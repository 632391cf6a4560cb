"""What a planned job needs: GPU memory, time and disk, and settings with which it fits."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from snakechat.modeling.vllm_sampler import GPU_MEMORY_FRACTION
from snakechat.planning.changes import job_name
from snakechat.planning.compute_time import Gpu
from snakechat.planning.job_workloads import job_workload
from snakechat.planning.memory import GIB, USABLE_MEMORY, num_processes
from snakechat.planning.model_configs import base_model_bytes
from snakechat.planning.plan import Plan
from snakechat.planning.stage_choice import determine_stage
from snakechat.planning.workload import Workload
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import manifest_path, read_manifest
from snakechat.workflow.placement import Placement

# Values that are suggested for a job that does not fit: the LoRA rank of DeepSpeed-Chat, the GPUs
# of a usual node, and the smallest micro-batch that makes sense.
SUGGESTED_LORA_RANK = 128
SUGGESTED_GPUS_PER_NODE = 8
MIN_MICRO_BATCH_TOKENS = 256
# Assumed bytes per second of a download.
DOWNLOAD_BANDWIDTH = 100e6


class JobEstimate:
    """The estimate of a job; None stands for what is unknown, or not needed without a GPU.

    Attributes:
        memory: Bytes of a GPU by component at peak memory.
        moment: The moment of peak memory.
        host_memory: Bytes of a node's CPU memory.
        flops, seconds: Operations and time of the whole job.
        disk: Bytes of the result.
        warnings: Why the job does not fit, and what would help.
        notes: Assumptions.
    """

    def __init__(self, path: str, plan: Plan, gpu: Gpu) -> None:
        self.spec, self.placement, _ = plan.jobs[path]
        self.plan, self.gpu, self.stale = plan, gpu, path in plan.stale
        self.workload: Workload | None = None
        self.moment: str | None = None
        self.memory: dict[str, float] | None = None
        self.host_memory: float | None = None
        self.flops: float | None = None
        self.seconds: float | None = None
        self.disk = None if self.stale else result_bytes(path)
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.num_gpus = 0
        try:
            chosen, reason = determine_stage(self.spec, self.placement, plan, gpu.memory)
            self.placement = replace(self.placement, **chosen)
            self.workload = self._workload(self.spec, self.placement)
            if self.workload:
                self._estimate(self.workload, reason)
            elif self.disk is None:
                self._estimate_base_model()
        except InputError as error:
            self.warnings.append(str(error))

    def __str__(self) -> str:
        return job_name(self.spec)

    def _workload(self, spec: Mapping[str, Any], placement: Placement) -> Workload | None:
        """Return the workload of the job with a spec and a placement; None if it needs no GPU."""
        gpu_memory = self.gpu.memory if placement.gpus_per_node else 0
        return job_workload(spec, placement, self.plan, gpu_memory)

    def _estimate(self, workload: Workload, reason: str) -> None:
        """Set the attributes of a job that runs models.

        reason: Why the ZeRO stage was chosen; empty if it was not.
        """
        placement = self.placement
        self.num_gpus = placement.nodes * placement.gpus_per_node
        self.moment, self.memory = workload.memory(
            placement, self.gpu.memory if self.num_gpus else 0
        )
        self.host_memory, self.flops = workload.host_memory(placement), workload.flops
        if self.num_gpus:
            self.seconds = workload.seconds(self.gpu, self.num_gpus)
        if self.stale:
            self.notes = [*([reason] if reason else []), *workload.notes]
            self.notes += workload.time_notes() if self.num_gpus else ()
            self.disk = workload.result_bytes(self.spec["settings"].get("save_dtype"))
            self.warnings = [*self._memory_warnings(workload), *self._host_memory_warnings()]

    def _estimate_base_model(self) -> None:
        """Set the disk of a base model, and the time of its download."""
        self.disk = base_model_bytes(self.spec["path"], self.plan)
        if self.disk is not None and "hub" in self.spec["settings"]:
            self.seconds = self.disk / DOWNLOAD_BANDWIDTH
            self.notes.append(
                f"assumed: downloads at {DOWNLOAD_BANDWIDTH / 1e6:.0f} MB/s; the cache of the Hub"
                " takes as much disk again"
            )

    def _memory_warnings(self, workload: Workload) -> list[str]:
        """Return a warning with settings that help, if the job does not fit on its GPUs."""
        if self.fits():
            return []
        warning = f"does not fit: {self._lack_of_memory(workload)}"
        changes = list(self._suggestions(workload))
        # Of several values of the same settings, the first one changes the least.
        fitting: dict[tuple[str, ...], str] = {}
        for change in changes:
            if tuple(change) not in fitting and self.fits(**change):
                fitting[tuple(change)] = format_settings(change)
        if fitting:
            return [f"{warning}; fits with {' | '.join(fitting.values())}"]
        combined: dict[str, Any] = {}
        for change in changes:
            combined |= {name: value for name, value in change.items() if name != "lora_rank"}
        if combined and self.fits(**combined):
            return [f"{warning}; fits with all of {format_settings(combined)}"]
        return [f"{warning}; no placement helps: use larger GPUs or a smaller model"]

    def _lack_of_memory(self, workload: Workload) -> str:
        """Return what a GPU needs and what it has."""
        assert self.memory
        if not self._vllm_fits(workload):
            return (
                f"vllm needs {format_bytes(workload.vllm_bytes())} and uses"
                f" {GPU_MEMORY_FRACTION:.0%} of a GPU, {format_bytes(self._vllm_limit())}"
            )
        largest = max(self.memory, key=self.memory.__getitem__)
        return (
            f"{format_bytes(sum(self.memory.values()))} at {self.moment} ({largest}:"
            f" {format_bytes(self.memory[largest])}), {'a GPU' if self.num_gpus else 'mem_mb'} has"
            f" {format_bytes(self.memory_limit())}"
        )

    def _host_memory_warnings(self) -> list[str]:
        """Return a warning if the job does not fit into the CPU memory of its nodes."""
        assert self.host_memory is not None
        if self.host_memory <= self.placement.mem_mb << 20:
            return []
        return [
            f"needs {format_bytes(self.host_memory)} of CPU memory on each node, mem_mb is"
            f" {self.placement.mem_mb}"
        ]

    def _suggestions(self, workload: Workload) -> Iterator[dict[str, Any]]:
        """Yield changes of settings that reduce memory, the smallest changes first."""
        placement = self.placement
        if workload.vllm_ranks:
            gpus = placement.gpus_per_node
            for size in range(workload.vllm_ranks + 1, gpus + 1):
                if gpus % size == 0:
                    yield {"vllm_tensor_parallel_size": size}
        tokens = placement.micro_batch_tokens // 2
        while tokens >= max(MIN_MICRO_BATCH_TOKENS, workload.largest.length):
            yield {"micro_batch_tokens": tokens}
            tokens //= 2
        if not workload.trained:
            yield from self._suggested_partitions(workload)
            return
        if not placement.activation_checkpointing:
            yield {"activation_checkpointing": True}
        if not placement.offload_frozen and self.spec["rule"] == "train_rlhf":
            yield {"offload_frozen": True}
        if num_processes(placement) > 1:
            for stage in range(max(placement.zero_stage, 1) + 1, 4):
                yield {"zero_stage": stage}
        if placement.offload == "none":
            yield {"zero_stage": max(placement.zero_stage, 2), "offload": "optimizer"}
        yield from self._suggested_partitions(workload)
        if self.spec["settings"]["lora_rank"] == 0:
            yield {"lora_rank": SUGGESTED_LORA_RANK}

    def _suggested_partitions(self, workload: Workload) -> Iterator[dict[str, Any]]:
        """Yield changes with which an evaluation partitions its models."""
        if self.placement.offload != "parameters":
            yield {"zero_stage": 3, "offload": "parameters"}
        if 0 < self.placement.gpus_per_node < SUGGESTED_GPUS_PER_NODE:
            yield {"zero_stage": 3, "gpus_per_node": SUGGESTED_GPUS_PER_NODE}

    def memory_limit(self) -> float:
        """Return the bytes that the tensors of a process may occupy."""
        if self.num_gpus == 0:
            return self.placement.mem_mb << 20
        return self.gpu.memory * USABLE_MEMORY

    def _vllm_limit(self) -> float:
        """Return the bytes of a GPU that vLLM uses."""
        return GPU_MEMORY_FRACTION * self.gpu.memory

    def _vllm_fits(self, workload: Workload) -> bool:
        """Return whether vLLM, if it samples, has memory for the weights and a response."""
        return workload.vllm_bytes() <= self._vllm_limit()

    def fits(self, lora_rank: int | None = None, **placement: Any) -> bool:
        """Return whether the job fits into memory, with changed settings if any."""
        settings = self.spec["settings"]
        if lora_rank:
            settings = settings | {"lora_rank": lora_rank}
        changed = replace(self.placement, **placement)
        workload = self._workload(self.spec | {"settings": settings}, changed)
        assert workload
        gpu_memory = self.gpu.memory if changed.gpus_per_node else 0
        _, memory = workload.memory(changed, gpu_memory)
        return sum(memory.values()) <= self.memory_limit() and self._vllm_fits(workload)

    def as_json(self) -> dict[str, Any]:
        """Return the estimate as JSON values."""
        return {
            "job": str(self),
            "path": self.spec["path"],
            "stale": self.stale,
            "gpus": self.num_gpus,
            "moment": self.moment,
            "memory": self.memory,
            "host_memory": self.host_memory,
            "disk": self.disk,
            "flops": self.flops,
            "seconds": self.seconds,
            "warnings": self.warnings,
            "notes": self.notes,
        }


def result_bytes(path: str) -> float | None:
    """Return the bytes of an existing result according to its manifest, None without one."""
    manifest = read_manifest(manifest_path(path))
    if manifest is None:
        return None
    return sum(entry["size"] for entry in manifest["files"].values())


def format_bytes(number: float) -> str:
    """Format bytes in GiB, small numbers in MiB."""
    return f"{number / GIB:,.1f} GiB" if number >= GIB / 10 else f"{number / (1 << 20):,.1f} MiB"


def format_settings(settings: Mapping[str, Any]) -> str:
    """Format settings as in config.yaml."""
    return ", ".join(f"{name}: {str(value).lower()}" for name, value in settings.items())
