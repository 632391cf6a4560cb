"""The work of a job on GPUs: models, micro-batches, operations."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from snakechat.planning.compute_time import Gpu, compute_seconds, generation_seconds
from snakechat.planning.footprint import SCORE, BatchShape, ModelSpec, measure_size
from snakechat.planning.memory import (
    TrainedModel,
    checkpoint_bytes,
    highest_peak,
    host_memory,
    inference_host_memory,
    inference_memory,
    model_folder_bytes,
    training_memory,
)
from snakechat.training.zero_stages import DEFAULT_BUFFERS, ZeroBuffers


class Generation(NamedTuple):
    """Responses that a model generates."""

    model: ModelSpec
    num_responses: float


class Workload(NamedTuple):
    """The work of a job.

    trained: Models that it trains.
    frozen: Models that it evaluates and does not train.
    largest: Its largest micro-batch.
    flops: Operations of forward and backward passes; None if the number of rows is unknown.
    generation: The largest batch that it generates, if any.
    generations: Responses that it generates.
    ema: Whether it keeps a moving average of the first trained model.
    one_at_a_time: Whether it has one of its models in memory at a time. Each of them generates,
        apart from reward models.
    notes: Assumptions, for the user.
    """

    trained: list[TrainedModel]
    frozen: list[ModelSpec]
    largest: BatchShape
    flops: float | None
    generation: BatchShape | None = None
    generations: tuple[Generation, ...] = ()
    ema: bool = False
    one_at_a_time: bool = False
    notes: tuple[str, ...] = ()

    def memory(
        self,
        placement: Mapping[str, Any],
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
            )
        return highest_peak(
            inference_memory(
                models,
                placement,
                self.largest,
                None if models[0].loss == SCORE else self.generation,
                gpu_memory,
                buffers,
            )
            for models in self._evaluated_together()
        )

    def _evaluated_together(self) -> list[list[ModelSpec]]:
        """Return the groups of evaluated models that are in memory at the same time."""
        return [[model] for model in self.frozen] if self.one_at_a_time else [self.frozen]

    def host_memory(self, placement: Mapping[str, Any]) -> float:
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

    def result_bytes(self) -> float | None:
        """Return the bytes of the trained model's files, None if the job trains none."""
        if not self.trained:
            return None
        return (2 if self.ema else 1) * model_folder_bytes(self.trained[0].model)

    def checkpoint_bytes(self) -> float:
        """Return the bytes of a checkpoint."""
        return checkpoint_bytes(self.trained)

    def seconds(self, gpu: Gpu, num_gpus: int) -> float | None:
        """Return the seconds on a number of GPUs; None if the number of rows is unknown."""
        if self.flops is None:
            return None
        seconds = compute_seconds(self.flops, gpu, num_gpus)
        if self.generation:
            seconds += sum(
                generation_seconds(model, num_responses, self.generation, gpu, num_gpus)
                for model, num_responses in self.generations
            )
        return seconds
