"""The work of a job on GPUs: models, micro-batches, operations."""

from collections.abc import Iterator
from typing import NamedTuple

from snakechat.planning.activation_memory import SCORE, BatchShape, ModelSpec, measure_size
from snakechat.planning.compute_time import (
    LORA_FLOPS_UTILIZATION,
    SECONDS_PER_LAYER,
    Gpu,
    compute_seconds,
    generation_seconds,
)
from snakechat.planning.memory import (
    TrainedModel,
    cache_bytes,
    checkpoint_bytes,
    highest_peak,
    host_memory,
    inference_host_memory,
    inference_memory,
    model_folder_bytes,
    training_memory,
    weight_bytes,
)
from snakechat.training.zero_stages import DEFAULT_BUFFERS, ZeroBuffers
from snakechat.workflow.placement import Placement


class Generation(NamedTuple):
    """Responses that a model generates, in batches of a shape.

    is_captured: Whether a CUDA graph launches the kernels of a step; vLLM has its own.
    num_ranks: GPUs that divide the model.
    """

    model: ModelSpec
    num_responses: float
    shape: BatchShape
    is_captured: bool = True
    num_ranks: int = 1

    def seconds(self, gpu: Gpu, num_gpus: int) -> float:
        """Return the seconds on a number of GPUs."""
        model, num_responses, shape, is_captured, num_ranks = self
        return generation_seconds(
            model, num_responses, shape, gpu, num_gpus, is_captured, num_ranks
        )


class Workload(NamedTuple):
    """The work of a job.

    trained: Models that it trains.
    frozen: Models that it evaluates and does not train.
    largest: Its largest micro-batch.
    flops: Operations of forward and backward passes; None if the number of rows is unknown.
    lora_flops: The part of flops that trains models with adapters.
    generation: The largest batch that it generates, if any.
    vllm_ranks: Processes of a vLLM engine that generates; 0 if the model itself does.
    generations: Responses that it generates.
    ema: Whether it keeps a moving average of the first trained model.
    one_at_a_time: Whether it has one of its models in memory at a time. Each of them generates,
        apart from reward models.
    notes: Assumptions, for the user.
    file_bytes: Bytes of its result, if it trains no model; None if they are few or unknown.
    """

    trained: list[TrainedModel]
    frozen: list[ModelSpec]
    largest: BatchShape
    flops: float | None
    generation: BatchShape | None = None
    vllm_ranks: int = 0
    generations: tuple[Generation, ...] = ()
    ema: bool = False
    one_at_a_time: bool = False
    notes: tuple[str, ...] = ()
    lora_flops: float | None = 0
    file_bytes: float | None = None

    def memory(
        self,
        placement: Placement,
        gpu_memory: float = 0,
        buffers: ZeroBuffers = DEFAULT_BUFFERS,
    ) -> tuple[str, dict[str, float]]:
        """Return the moment of peak memory, and the bytes of a GPU by component.

        gpu_memory: Bytes of a GPU; 0 on CPUs.
        """
        if self.trained:
            return training_memory(
                self.trained,
                self.frozen,
                placement,
                self.largest,
                self.generation,
                self.ema,
                gpu_memory,
                buffers,
                self.vllm_ranks,
            )
        return highest_peak(
            inference_memory(
                models,
                placement,
                self.largest,
                None if models[0].loss == SCORE else self.generation,
                gpu_memory,
                buffers,
                self.vllm_ranks,
            )
            for models in self._evaluated_together()
        )

    def _evaluated_together(self) -> list[list[ModelSpec]]:
        """Return the groups of evaluated models that are in memory at the same time."""
        return [[model] for model in self.frozen] if self.one_at_a_time else [self.frozen]

    def vllm_bytes(self) -> float:
        """Return the bytes of a GPU that vLLM needs: for weights, and the cache of a response.

        0 without vLLM.
        """
        if not (self.vllm_ranks and self.generation):
            return 0
        model = self.trained[0].model if self.trained else self.frozen[0]
        response = cache_bytes(model, self.generation._replace(sequences=1))
        return (weight_bytes(model) + response) / self.vllm_ranks

    def host_memory(self, placement: Placement) -> float:
        """Return the bytes of a node's CPU memory."""
        if self.trained:
            return host_memory(self.trained, self.frozen, placement)
        return max(
            inference_host_memory(models, placement) for models in self._evaluated_together()
        )

    def num_weights(self) -> tuple[int, int]:
        """Return the number of weights of all models in memory, and of those that are trained."""
        models = [*(entry.model for entry in self.trained), *self.frozen]
        sizes = [measure_size(model).weights for model in models]
        trained = sum(measure_size(entry.model).trained for entry in self.trained)
        return max(sizes) if self.one_at_a_time else sum(sizes), trained

    def result_bytes(self, save_dtype: str | None) -> float | None:
        """Return the bytes of the trained model, or of the other files of the result.

        save_dtype: The dtype of the files; None for that of the training.
        """
        if not self.trained:
            return self.file_bytes
        model = self.trained[0].model
        model = model._replace(dtype=save_dtype or model.dtype)
        return (2 if self.ema else 1) * model_folder_bytes(model)

    def checkpoint_bytes(self) -> float:
        """Return the bytes of a checkpoint."""
        return checkpoint_bytes(self.trained)

    def seconds(self, gpu: Gpu, num_gpus: int) -> float | None:
        """Return the seconds on a number of GPUs; None if the number of rows is unknown."""
        if self.flops is None or self.lora_flops is None:
            return None
        return (
            compute_seconds(self.flops - self.lora_flops, gpu, num_gpus)
            + compute_seconds(self.lora_flops, gpu, num_gpus, LORA_FLOPS_UTILIZATION)
            + sum(generation.seconds(gpu, num_gpus) for generation in self.generations)
        )

    def time_notes(self) -> Iterator[str]:
        """Yield the assumptions about the time on GPUs that only some jobs have."""
        if self.lora_flops:
            yield f"assumed: training adapters reaches {LORA_FLOPS_UTILIZATION:.0%} of the TFLOPS"
        if not all(generation.is_captured for generation in self.generations):
            yield (
                f"assumed: without CUDA graphs, each layer takes {1e3 * SECONDS_PER_LAYER:g} ms to"
                " sample a token"
            )
