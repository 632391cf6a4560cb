"""Estimated memory and disk of a job, by component. Nothing is run.

Memory is that of the phase with the highest peak: what a job holds at all times, and what the phase
adds. Sizes and activations come from snakechat/planning/activation_memory.py. Units are bytes
unless a docstring says elements.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from snakechat.modeling.model_check import MAX_FP32_WEIGHTS, NUM_TOKENS
from snakechat.modeling.vllm_sampler import GPU_MEMORY_FRACTION
from snakechat.planning.activation_memory import (
    SCORE,
    BatchShape,
    ModelSpec,
    inference_peak,
    measure_size,
    training_peaks,
)
from snakechat.training.zero_stages import (
    DEFAULT_BUFFERS,
    ZeroBuffers,
    evaluates_partitioned,
    is_partitioned,
    samples_whole,
    stage_used,
    zero_buffers,
)
from snakechat.workflow.placement import Placement

GIB = 1 << 30
BYTES_PER_ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2}
COMPONENTS = ("weights", "gradients", "optimizer", "activations", "cache", "buffers")
# Assumed fraction of a GPU's memory for tensors. CUDA and fragmentation take the rest.
USABLE_MEMORY = 0.93

# Bytes by component, of those that are not 0.
Memory = dict[str, float]
# The name of a phase, and its memory.
Phase = tuple[str, Memory]


class TrainedModel(NamedTuple):
    """A model that a job trains, and the ZeRO stage of its placement."""

    model: ModelSpec
    zero_stage: int

    @property
    def stage(self) -> int:
        """The ZeRO stage that training uses."""
        return stage_used(self.zero_stage, self.model.dtype)


def add_components(*memories: Memory) -> Memory:
    """Return the sum of memories by component."""
    return {name: sum(memory.get(name, 0) for memory in memories) for name in COMPONENTS}


def num_processes(placement: Placement) -> int:
    """Return the number of processes of a job: one per GPU, or one per node without GPUs."""
    return placement.nodes * max(placement.gpus_per_node, 1)


# --- peaks --------------------------------------------------------------------------------------


def training_memory(
    trained: Sequence[TrainedModel],
    frozen: Sequence[ModelSpec],
    placement: Placement,
    largest: BatchShape,
    generation: BatchShape | None,
    has_ema: bool,
    gpu_memory: float = 0,
    buffers: ZeroBuffers = DEFAULT_BUFFERS,
    vllm_ranks: int = 0,
) -> Phase:
    """Return the phase of a training with the highest peak in a process.

    Args:
        trained: trained models, of RLHF the actor first.
        frozen: models that are only evaluated.
        largest: the largest micro-batch.
        generation: the largest batch that generates, if any.
        has_ema: whether a moving average of the first model is kept.
        gpu_memory: bytes of a GPU; 0 on CPUs.
        vllm_ranks: processes of a vLLM engine; 0 if the first model itself generates.
    """
    resident = [resident_memory(entry, placement, buffers) for entry in trained]
    if has_ema:
        partitions = num_partitions(trained[0], placement)
        resident.append({"optimizer": 4 * measure_size(trained[0].model).trained / partitions})
    frozen_weights = 0.0
    if not placement.offload_frozen:
        frozen_weights = sum(frozen_bytes(model, placement) for model in frozen)
    resident.append({"weights": frozen_weights})
    phases = [*training_phases(trained, frozen, placement, largest, buffers)]
    phases += [("comparison", comparison_memory(entry)) for entry in trained]
    if generation:
        sampled = sampling_memory(trained[0], generation, gpu_memory, buffers, vllm_ranks)
        phases.append(("sampling", sampled))
    phases = [(name, add_components(*resident, memory)) for name, memory in phases]
    # Before ZeRO 1 and 2 partition anything. With ZeRO 3, each process reads its partition.
    loaded = frozen_weights
    for entry in trained:
        partitions = num_partitions(entry, placement) if entry.stage == 3 else 1
        loaded += weight_bytes(entry.model) / partitions
    phases.append(("loading", add_components({"weights": loaded})))
    return highest_peak(phases)


def inference_memory(
    models: Sequence[ModelSpec],
    placement: Placement,
    largest: BatchShape,
    generation: BatchShape | None = None,
    gpu_memory: float = 0,
    buffers: ZeroBuffers = DEFAULT_BUFFERS,
    vllm_ranks: int = 0,
) -> Phase:
    """Return the phase with the highest peak of a job that evaluates models, all in memory.

    Args:
        generation: the largest batch that the first model generates, if any.
        gpu_memory: bytes of a GPU; 0 on CPUs.
        vllm_ranks: processes of a vLLM engine; 0 if the first model itself generates.
    """
    entries = [evaluated_entry(model, placement) for model in models]
    offloaded = placement.offload == "parameters"
    weights: Memory = {
        "weights": sum(
            weight_bytes(entry.model) / num_partitions(entry, placement)
            for entry in entries
            if not (entry.stage == 3 and offloaded)
        )
    }
    phases = [("comparison", comparison_memory(entry)) for entry in entries]
    for entry in entries:
        gathered: Memory = {"weights": gathered_bytes(entry, buffers)}
        activations = inference_activations(entry.model, largest)
        phases.append(("scoring", add_components(gathered, activations)))
    if generation:
        sampled = sampling_memory(entries[0], generation, gpu_memory, buffers, vllm_ranks)
        phases.append(("sampling", sampled))
    return highest_peak((name, add_components(weights, memory)) for name, memory in phases)


def comparison_memory(entry: TrainedModel) -> Memory:
    """Return what the comparison of a model with transformers' passes adds, if in fp32."""
    model = entry.model
    num_weights = measure_size(model).weights
    if entry.stage == 3 or num_weights > MAX_FP32_WEIGHTS:
        return {}
    rows = BatchShape(sequences=2, length=NUM_TOKENS, targets=NUM_TOKENS)
    copied: Memory = {"weights": 0 if model.dtype == "fp32" else 4 * num_weights}
    return add_components(copied, inference_activations(model._replace(dtype="fp32"), rows))


def sampling_memory(
    entry: TrainedModel,
    generation: BatchShape,
    gpu_memory: float,
    buffers: ZeroBuffers,
    vllm_ranks: int,
) -> Memory:
    """Return what generation adds to a model: vLLM, or the weights that ZeRO 3 gathers for it."""
    if vllm_ranks:
        return vllm_memory(entry.model, gpu_memory, vllm_ranks)
    gathered: Memory = {"weights": gathered_bytes(entry, buffers)}
    if entry.stage == 3 and samples_whole(weight_bytes(entry.model), gpu_memory):
        gathered = {"weights": weight_bytes(entry.model)}
    return add_components(gathered, generation_memory(entry.model, generation))


def vllm_memory(model: ModelSpec, gpu_memory: float, num_ranks: int) -> Memory:
    """Return what a vLLM engine of a number of processes takes of a GPU while it is awake.

    Its share of the weights, and keys and values in the rest of its fraction of the memory.
    """
    weights = weight_bytes(model) / num_ranks
    return {"weights": weights, "cache": max(GPU_MEMORY_FRACTION * gpu_memory - weights, 0)}


def highest_peak(phases: Iterable[Phase]) -> Phase:
    """Return the phase with the most bytes."""
    return max(phases, key=lambda phase: sum(phase[1].values()))


def host_memory(
    trained: Sequence[TrainedModel], frozen: Sequence[ModelSpec], placement: Placement
) -> float:
    """Return the bytes of a node's own memory: offloaded tensors, and models while they load.

    transformers creates a model in the CPU's memory, in each process, one model at a time. With
    ZeRO 3, a process reads its partition of one weight at a time.
    """
    local_processes = max(placement.gpus_per_node, 1)
    loaded = [loading_bytes(entry, placement) for entry in trained]
    loaded += [loading_bytes(frozen_entry(model, placement), placement) for model in frozen]
    offloaded: float = 0
    if placement.offload_frozen:
        offloaded = sum(frozen_bytes(model, placement) for model in frozen) * local_processes
    for entry in trained:
        on_gpu = resident_memory(entry, placement)
        without_offload = resident_memory(entry, replace(placement, offload="none"))
        offloaded += local_processes * sum(
            without_offload[component] - on_gpu[component] for component in without_offload
        )
    return offloaded + local_processes * max(loaded)


def inference_host_memory(models: Sequence[ModelSpec], placement: Placement) -> float:
    """Return the bytes of a node's own memory in a job that evaluates models."""
    local_processes = max(placement.gpus_per_node, 1)
    entries = [evaluated_entry(model, placement) for model in models]
    offloaded: float = 0
    if placement.offload == "parameters":
        partitions = (
            weight_bytes(e.model) / num_partitions(e, placement) for e in entries if e.stage
        )
        offloaded = local_processes * sum(partitions)
    return offloaded + local_processes * max(loading_bytes(entry, placement) for entry in entries)


def loading_bytes(entry: TrainedModel, placement: Placement) -> float:
    """Return the bytes of a process's CPU memory that a model takes while it is loaded."""
    if entry.stage < 3:
        return weight_bytes(entry.model)
    width = BYTES_PER_ELEMENT[entry.model.dtype]
    return width * measure_size(entry.model).largest / num_partitions(entry, placement)


def frozen_entry(model: ModelSpec, placement: Placement) -> TrainedModel:
    """Return a frozen model with the ZeRO stage that partitions it, if any."""
    return TrainedModel(model, 3 if is_partitioned(placement, model.dtype) else 0)


def evaluated_entry(model: ModelSpec, placement: Placement) -> TrainedModel:
    """Return a model of a job that trains none, with the ZeRO stage that partitions it, if any."""
    return TrainedModel(model, 3 if evaluates_partitioned(placement, model.dtype) else 0)


def frozen_bytes(model: ModelSpec, placement: Placement) -> float:
    """Return the bytes that a process holds of a frozen model."""
    return weight_bytes(model) / num_partitions(frozen_entry(model, placement), placement)


# --- components ---------------------------------------------------------------------------------


def resident_memory(
    entry: TrainedModel, placement: Placement, buffers: ZeroBuffers = DEFAULT_BUFFERS
) -> Memory:
    """Return what a process holds of a trained model at all times, from the first step on.

    Rajbhandari et al. 2020 (ZeRO), section 3.1: weights in their dtype, and per trained weight 12
    bytes of optimizer states: the fp32 master weight and two moments. Gradients accumulate in fp32
    here, 4 bytes. Of n processes each has 1/n of the optimizer states from stage 1 on, of the
    gradients from stage 2 on, and of the weights at stage 3. At stage 0 in fp32, weights and master
    weights are the same tensors. Offloaded tensors are in the CPU's memory.
    """
    size, n = measure_size(entry.model), num_partitions(entry, placement)
    if entry.stage == 0:
        master = 0 if entry.model.dtype == "fp32" else 4
        return {
            "weights": weight_bytes(entry.model),
            "gradients": 4 * size.trained,
            "optimizer": (8 + master) * size.trained,
        }
    memory: Memory = {
        "weights": weight_bytes(entry.model) / (n if entry.stage == 3 else 1),
        "gradients": 4 * size.trained / (1 if entry.stage == 1 else n),
        "optimizer": 12 * size.trained / n,
        "buffers": bucket_bytes(entry, buffers) if entry.stage == 3 else 0,
    }
    if placement.offload != "none":
        memory |= {"gradients": 0, "optimizer": 0}
    if placement.offload == "parameters":
        memory["weights"] = 0
    return memory


def training_phases(
    trained: Sequence[TrainedModel],
    frozen: Sequence[ModelSpec],
    placement: Placement,
    largest: BatchShape,
    buffers: ZeroBuffers,
) -> Iterator[Phase]:
    """Yield the phases of a training and what each adds to the resident memory."""
    for entry in trained:
        forward, backward = training_peaks(entry.model, largest)
        gathered: Memory = {"weights": gathered_bytes(entry, buffers)}
        bucket: Memory = {"buffers": 0 if entry.stage == 3 else bucket_bytes(entry, buffers)}
        # Stage 1 holds its bucket during all micro-batches of a step, stage 2 during backward.
        early: Memory = bucket if entry.stage == 1 else {}
        yield "forward", add_components(gathered, early, {"activations": forward})
        # A bucket that is full before the end is sent while activations are still in memory.
        is_full = measure_size(entry.model).trained > buffers.bucket
        copy = bucket_copy_bytes(entry, buffers)
        activations: Memory = {"activations": backward, "buffers": copy if is_full else 0}
        yield "backward", add_components(gathered, bucket, activations)
        yield "sending", add_components(gathered, bucket, {"buffers": copy})
        yield "scoring", add_components(gathered, inference_activations(entry.model, largest))
        if entry.stage == 3:
            # The largest weight, merged in fp32. A saved reward model is loaded and evaluated.
            yield "saving", add_components({"weights": 12 * measure_size(entry.model).largest})
            if entry.model.loss == SCORE:
                copy_bytes = weight_bytes(entry.model) / num_partitions(entry, placement)
                scoring = inference_activations(entry.model, largest)
                yield "saving", add_components(gathered, {"weights": copy_bytes}, scoring)
    for model in frozen:
        offloaded = placement.offload_frozen
        loaded = gathered_bytes(frozen_entry(model, placement), buffers)
        if offloaded and not is_partitioned(placement, model.dtype):
            loaded = weight_bytes(model)
        activations = inference_activations(model, largest)
        yield "scoring", add_components({"weights": loaded}, activations)


def weight_bytes(model: ModelSpec) -> int:
    """Return the bytes of all weights of a model."""
    return BYTES_PER_ELEMENT[model.dtype] * measure_size(model).weights


def num_partitions(entry: TrainedModel, placement: Placement) -> int:
    """Return the number of partitions of a model's optimizer states."""
    return num_processes(placement) if entry.stage else 1


def bucket_bytes(entry: TrainedModel, buffers: ZeroBuffers) -> int:
    """Return the bytes of a gradient bucket: fp32, at stage 2 the model's dtype."""
    if entry.stage == 0:
        return 0
    width = BYTES_PER_ELEMENT[entry.model.dtype] if entry.stage == 2 else 4
    return zero_buffers(entry.stage, measure_size(entry.model).weights, buffers).bucket * width


def bucket_copy_bytes(entry: TrainedModel, buffers: ZeroBuffers) -> int:
    """Return the bytes of the copy of a bucket that is sent: fp32, or partitioned for stage 3."""
    if entry.stage < 2 or (entry.stage == 2 and entry.model.dtype == "fp32"):
        return 0
    size = measure_size(entry.model)
    return 4 * min(size.trained, zero_buffers(entry.stage, size.weights, buffers).bucket)


def gathered_bytes(entry: TrainedModel, buffers: ZeroBuffers) -> float:
    """Return the bytes of whole weights that stage 3 holds during a pass, besides its partition.

    DeepSpeed keeps weights that are used again before `reuse` others. Forward and backward together
    use each weight twice, so that is half of it. In addition there are prefetched weights, and the
    current layer.
    """
    if entry.stage < 3:
        return 0
    size = measure_size(entry.model)
    buffers = zero_buffers(entry.stage, size.weights, buffers)
    kept = buffers.reuse / 2 + buffers.prefetch + max(size.layer, size.largest)
    return BYTES_PER_ELEMENT[entry.model.dtype] * min(size.weights, kept)


def inference_activations(model: ModelSpec, shape: BatchShape) -> Memory:
    """Return what a forward pass without gradients adds."""
    return {"activations": inference_peak(model, shape)}


def cache_bytes(model: ModelSpec, shape: BatchShape) -> int:
    """Return the bytes of the keys and values of all tokens of a batch."""
    width = BYTES_PER_ELEMENT[model.dtype]
    return width * measure_size(model).kv * shape.sequences * shape.length


def generation_memory(model: ModelSpec, shape: BatchShape) -> Memory:
    """Return what generation adds.

    It adds keys and values of all tokens; a copy of half a layer of them while ended rows leave the
    batch or, on a GPU, keys and values of the prompts of the next batch; the forward pass of the
    prompts; the last logits of each row, in the dtype and three times in fp32.
    """
    size, width = measure_size(model), BYTES_PER_ELEMENT[model.dtype]
    prompt_length = shape.length - shape.targets
    copied = prompt_length / shape.length if shape.on_gpu else 0.5 / size.layers
    cache = cache_bytes(model, shape) * (1 + copied)
    prompts = shape._replace(length=prompt_length, targets=prompt_length)
    forward = inference_peak(model._replace(loss=SCORE), prompts)
    logits = shape.sequences * size.vocabulary * (width + 12)
    return {"cache": cache, "activations": forward + logits}


# --- disk ---------------------------------------------------------------------------------------


def model_folder_bytes(model: ModelSpec) -> int:
    """Return the bytes of a saved model: its weights and, with LoRA, the adapters apart."""
    return weight_bytes(model)


def checkpoint_bytes(trained: Sequence[TrainedModel]) -> int:
    """Return the bytes of a training state: master weights and moments of all trained weights."""
    return sum(12 * measure_size(entry.model).trained for entry in trained)
