"""Estimated memory and disk of a job, by component. Nothing is run.

Memory is that of the phase with the highest peak: what a job holds at all times, and what the phase
adds. Sizes and activations come from snakechat/planning/activation_memory.py. Units are bytes
unless a docstring says elements.
"""

from collections.abc import Iterator
from dataclasses import replace

from snakechat.modeling.vllm_sampler import GPU_MEMORY_FRACTION
from snakechat.planning.activation_memory import (
    SCORE,
    BatchShape,
    ModelSpec,
    inference_peak,
    measure_size,
    training_peaks,
)
from snakechat.planning.workload import Generation, LoadedModel, Workload
from snakechat.training.zero_stages import (
    DEFAULT_BUFFERS,
    evaluates_partitioned,
    is_partitioned,
    samples_whole,
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


def add_components(*memories: Memory) -> Memory:
    """Return the sum of memories by component."""
    return {name: sum(memory.get(name, 0) for memory in memories) for name in COMPONENTS}


def num_processes(placement: Placement) -> int:
    """Return the number of processes of a job: one per GPU, or one per node without GPUs."""
    return placement.nodes * max(placement.gpus_per_node, 1)


# --- jobs ---------------------------------------------------------------------------------------


def peak_memory(workload: Workload, placement: Placement, gpu_memory: float = 0) -> Phase:
    """Return the phase of a job with the highest peak in a process, and its memory.

    gpu_memory: Bytes of a GPU; 0 on CPUs.
    """
    phases = (
        phase
        for group in _loaded_together(workload)
        for phase in _phases(group, placement, gpu_memory)
    )
    return max(phases, key=lambda phase: sum(phase[1].values()))


def _loaded_together(workload: Workload) -> list[Workload]:
    """Return the work with each group of models that are in memory at the same time."""
    if not workload.one_at_a_time:
        return [workload]
    return [workload._replace(frozen=[model]) for model in workload.frozen]


def _phases(workload: Workload, placement: Placement, gpu_memory: float) -> Iterator[Phase]:
    """Yield the phases of a job whose models are all in memory."""
    trained, frozen = workload.trained, evaluated_models(workload, placement)
    in_memory = 0 if _is_offloaded(workload, placement) else _partitions_bytes(frozen, placement)
    resident = [{"weights": in_memory}]
    resident += [resident_memory(entry, placement) for entry in trained]
    if workload.ema:
        partitions = num_partitions(trained[0], placement)
        resident.append({"optimizer": 4 * measure_size(trained[0].model).trained / partitions})
    added = [
        phase for entry in trained for phase in _training_phases(entry, placement, workload.largest)
    ]
    for entry in frozen:
        loaded = gathered_bytes(entry)
        if trained and placement.offload_frozen and entry.stage < 3:
            loaded = weight_bytes(entry.model)
        activations = inference_activations(entry.model, workload.largest)
        added.append(("scoring", add_components({"weights": loaded}, activations)))
    first = [*trained, *frozen][0]
    if workload.generations and first.model.loss != SCORE:
        added.append(("sampling", _sampling_memory(first, workload.generations[0], gpu_memory)))
    for name, memory in added:
        yield name, add_components(*resident, memory)


def host_memory(workload: Workload, placement: Placement) -> float:
    """Return the bytes of a node's own memory: offloaded tensors, and models while they load.

    transformers creates a model in the CPU's memory, in each process, one model at a time. With
    ZeRO 3, a process reads its partition of one weight at a time.
    """
    return max(_host_memory(group, placement) for group in _loaded_together(workload))


def _host_memory(workload: Workload, placement: Placement) -> float:
    """Return the bytes of a node's own memory for models that are loaded together."""
    frozen = evaluated_models(workload, placement)
    offloaded: float = 0
    if _is_offloaded(workload, placement):
        offloaded = _partitions_bytes(frozen, placement)
    for entry in workload.trained:
        on_gpu = resident_memory(entry, placement)
        without_offload = resident_memory(entry, replace(placement, offload="none"))
        offloaded += sum(without_offload.values()) - sum(on_gpu.values())
    loaded = max(loading_bytes(entry, placement) for entry in (*workload.trained, *frozen))
    return max(placement.gpus_per_node, 1) * (offloaded + loaded)


def loading_bytes(entry: LoadedModel, placement: Placement) -> float:
    """Return the bytes of a process's CPU memory that a model takes while it is loaded."""
    if entry.stage < 3:
        return weight_bytes(entry.model)
    width = BYTES_PER_ELEMENT[entry.model.dtype]
    return width * measure_size(entry.model).largest / num_partitions(entry, placement)


def evaluated_models(workload: Workload, placement: Placement) -> list[LoadedModel]:
    """Return the models that a job does not train, with the ZeRO stage that partitions them."""
    partitions = is_partitioned if workload.trained else evaluates_partitioned
    return [
        LoadedModel(model, 3 if partitions(placement, model.dtype) else 0)
        for model in workload.frozen
    ]


def _is_offloaded(workload: Workload, placement: Placement) -> bool:
    """Return whether the models that a job does not train are in the CPU's memory."""
    if workload.trained:
        return placement.offload_frozen
    return placement.offload == "parameters" and is_partitioned(placement, workload.frozen[0].dtype)


def _partitions_bytes(entries: list[LoadedModel], placement: Placement) -> float:
    """Return the bytes of the weights of models that a process holds."""
    return sum(weight_bytes(entry.model) / num_partitions(entry, placement) for entry in entries)


# --- components ---------------------------------------------------------------------------------


def resident_memory(entry: LoadedModel, placement: Placement) -> Memory:
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
        "buffers": bucket_bytes(entry) if entry.stage == 3 else 0,
    }
    if placement.offload != "none":
        memory |= {"gradients": 0, "optimizer": 0}
    if placement.offload == "parameters":
        memory["weights"] = 0
    return memory


def _training_phases(
    entry: LoadedModel, placement: Placement, largest: BatchShape
) -> Iterator[Phase]:
    """Yield the phases of training a model and what each adds to the resident memory."""
    forward, backward = training_peaks(entry.model, largest)
    gathered: Memory = {"weights": gathered_bytes(entry)}
    bucket: Memory = {"buffers": 0 if entry.stage == 3 else bucket_bytes(entry)}
    # Stage 1 holds its bucket during all micro-batches of a step, stage 2 during backward.
    early: Memory = bucket if entry.stage == 1 else {}
    yield "forward", add_components(gathered, early, {"activations": forward})
    # A bucket that is full before the end is sent while activations are still in memory.
    size = measure_size(entry.model)
    is_full = size.trained > DEFAULT_BUFFERS.bucket
    copy = bucket_copy_bytes(entry)
    activations: Memory = {"activations": backward, "buffers": copy if is_full else 0}
    yield "backward", add_components(gathered, bucket, activations)
    yield "sending", add_components(gathered, bucket, {"buffers": copy})
    if entry.stage == 3:
        # The largest weight, merged in fp32. A saved reward model is loaded and evaluated.
        yield "saving", add_components({"weights": 12 * size.largest})
        if entry.model.loss == SCORE:
            copy_bytes = weight_bytes(entry.model) / num_partitions(entry, placement)
            scoring = inference_activations(entry.model, largest)
            yield "saving", add_components(gathered, {"weights": copy_bytes}, scoring)


def _sampling_memory(entry: LoadedModel, generation: Generation, gpu_memory: float) -> Memory:
    """Return what generation adds to a model: vLLM, or the weights that ZeRO 3 gathers for it."""
    if generation.vllm_ranks:
        return vllm_memory(entry.model, gpu_memory, generation.vllm_ranks)
    gathered: Memory = {"weights": gathered_bytes(entry)}
    if entry.stage == 3 and samples_whole(weight_bytes(entry.model), gpu_memory):
        gathered = {"weights": weight_bytes(entry.model)}
    return add_components(gathered, generation_memory(entry.model, generation.shape))


def vllm_memory(model: ModelSpec, gpu_memory: float, num_ranks: int) -> Memory:
    """Return what a vLLM engine of a number of processes takes of a GPU while it is awake.

    Its share of the weights, and keys and values in the rest of its fraction of the memory.
    """
    weights = weight_bytes(model) / num_ranks
    return {"weights": weights, "cache": max(GPU_MEMORY_FRACTION * gpu_memory - weights, 0)}


def vllm_minimum(generation: Generation) -> float:
    """Return the bytes of a GPU that vLLM needs for weights and the cache of one response."""
    response = cache_bytes(generation.model, generation.shape._replace(sequences=1))
    return (weight_bytes(generation.model) + response) / generation.vllm_ranks


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


# --- sizes --------------------------------------------------------------------------------------


def weight_bytes(model: ModelSpec) -> int:
    """Return the bytes of all weights of a model; of a saved one with LoRA, adapters included."""
    return BYTES_PER_ELEMENT[model.dtype] * measure_size(model).weights


def cache_bytes(model: ModelSpec, shape: BatchShape) -> int:
    """Return the bytes of the keys and values of all tokens of a batch."""
    width = BYTES_PER_ELEMENT[model.dtype]
    return width * measure_size(model).kv * shape.sequences * shape.length


def num_partitions(entry: LoadedModel, placement: Placement) -> int:
    """Return the number of partitions of a model's optimizer states."""
    return num_processes(placement) if entry.stage else 1


def bucket_bytes(entry: LoadedModel) -> int:
    """Return the bytes of a gradient bucket: fp32, at stage 2 the model's dtype."""
    if entry.stage == 0:
        return 0
    width = BYTES_PER_ELEMENT[entry.model.dtype] if entry.stage == 2 else 4
    return zero_buffers(entry.stage, measure_size(entry.model).weights).bucket * width


def bucket_copy_bytes(entry: LoadedModel) -> int:
    """Return the bytes of the copy of a bucket that is sent: fp32, or partitioned for stage 3."""
    if entry.stage < 2 or (entry.stage == 2 and entry.model.dtype == "fp32"):
        return 0
    size = measure_size(entry.model)
    return 4 * min(size.trained, zero_buffers(entry.stage, size.weights).bucket)


def gathered_bytes(entry: LoadedModel) -> float:
    """Return the bytes of whole weights that stage 3 holds during a pass, besides its partition.

    DeepSpeed keeps weights that are used again before `reuse` others. Forward and backward together
    use each weight twice, so that is half of it. In addition there are prefetched weights, and the
    current layer.
    """
    if entry.stage < 3:
        return 0
    size = measure_size(entry.model)
    buffers = zero_buffers(entry.stage, size.weights)
    kept = buffers.reuse / 2 + buffers.prefetch + max(size.layer, size.largest)
    return BYTES_PER_ELEMENT[entry.model.dtype] * min(size.weights, kept)


def inference_activations(model: ModelSpec, shape: BatchShape) -> Memory:
    """Return what a forward pass without gradients adds."""
    return {"activations": inference_peak(model, shape)}


# --- disk ---------------------------------------------------------------------------------------


def result_bytes(workload: Workload, save_dtype: str | None) -> float:
    """Return the bytes of the trained model, or of the other files of the result.

    save_dtype: The dtype of the files. Defaults to the dtype of training.
    """
    if not workload.trained:
        return workload.file_bytes
    model = workload.trained[0].model
    return (2 if workload.ema else 1) * weight_bytes(
        model._replace(dtype=save_dtype or model.dtype)
    )


def checkpoint_bytes(workload: Workload) -> int:
    """Return the bytes of a training state: master weights and moments of all trained weights."""
    return sum(12 * measure_size(entry.model).trained for entry in workload.trained)
