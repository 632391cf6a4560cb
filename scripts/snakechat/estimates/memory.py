"""Estimated memory and disk of a job, by component. Nothing is run.

Memory is that of the phase with the highest peak: what a job holds at all times, and what the phase
adds. A trained weight takes 16 bytes, which the processes divide as ZeRO does. Sizes and
activations come from snakechat/estimates/activation_memory.py. Units are bytes.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from snakechat.estimates.activation_memory import (
    SCORE,
    BatchShape,
    ModelSpec,
    inference_peak,
    measure_size,
    training_peaks,
)
from snakechat.modeling.vllm_sampler import GPU_MEMORY_FRACTION
from snakechat.training.zero_stages import (
    evaluates_partitioned,
    is_partitioned,
    samples_whole,
    training_bytes,
)
from snakechat.workflow.placement import Placement

GIB = 1 << 30
BYTES_PER_ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2}
# weights: of models, or parts of them, that are not trained. training: weights, gradients and
# optimizer states of the others.
COMPONENTS = ("weights", "training", "activations", "cache")
# Assumed fraction of a GPU's memory for tensors. CUDA and fragmentation take the rest.
USABLE_MEMORY = 0.93

# Bytes by component, of those that are not 0.
Memory = dict[str, float]
# The name of a phase, and its memory.
Phase = tuple[str, Memory]


class LoadedModel(NamedTuple):
    """A model, and the ZeRO stage with which the processes partition it."""

    model: ModelSpec
    stage: int


class Generation(NamedTuple):
    """Responses that a model generates, in batches of a shape.

    num_responses: Of all processes; nan if the number is unknown.
    shape: The largest batch.
    vllm_ranks: Processes of a vLLM engine that generates; 0 if the model itself does.
    """

    model: ModelSpec
    num_responses: float
    shape: BatchShape
    vllm_ranks: int = 0


class Workload(NamedTuple):
    """The work of a job.

    trained: Models that it trains, of RLHF the actor first.
    frozen: Models that it evaluates and does not train.
    largest: Its largest micro-batch.
    flops: Operations of forward and backward passes; nan if the number of rows is unknown.
    generations: Responses that it generates; the first ones in the largest batches.
    ema: Whether it keeps a moving average of the first trained model.
    one_at_a_time: Whether it has one of its models in memory at a time. Each of them generates,
        apart from reward models.
    notes: Assumptions, for the user.
    """

    trained: list[LoadedModel]
    frozen: list[ModelSpec]
    largest: BatchShape
    flops: float
    generations: tuple[Generation, ...] = ()
    ema: bool = False
    one_at_a_time: bool = False
    notes: tuple[str, ...] = ()


def num_processes(placement: Placement) -> int:
    """Return the number of processes of a job: one per GPU, or one per node without GPUs."""
    return placement.nodes * max(placement.gpus_per_node, 1)


def peak_memory(workload: Workload, placement: Placement, gpu_memory: float = 0) -> Phase:
    """Return the phase of a job with the highest peak in a process, and its memory.

    gpu_memory: Bytes of a GPU; 0 on CPUs.
    """
    groups = [workload]
    if workload.one_at_a_time:
        groups = [workload._replace(frozen=[model]) for model in workload.frozen]
    phases = (phase for group in groups for phase in _phases(group, placement, gpu_memory))
    return max(phases, key=lambda phase: sum(phase[1].values()))


def _phases(workload: Workload, placement: Placement, gpu_memory: float) -> Iterator[Phase]:
    """Yield the phases of a job whose models are all in memory."""
    trained, processes = workload.trained, num_processes(placement)
    partitions = is_partitioned if trained else evaluates_partitioned
    frozen = [
        LoadedModel(model, 3 if partitions(placement, model.dtype) else 0)
        for model in workload.frozen
    ]
    resident = [resident_memory(entry, placement) for entry in trained]
    if not (placement.offload_frozen if trained else placement.offload == "parameters"):
        resident += [
            {"weights": weight_bytes(entry.model) / (processes if entry.stage == 3 else 1)}
            for entry in frozen
        ]
    if workload.ema:
        divided = processes if trained[0].stage else 1
        resident.append({"training": 4 * measure_size(trained[0].model).trained / divided})
    for entry in trained:
        activations = max(training_peaks(entry.model, workload.largest))
        yield "training", _sum(*resident, _layer(entry), {"activations": activations})
    for entry in frozen:
        loaded = _layer(entry)
        if trained and placement.offload_frozen and entry.stage < 3:
            loaded = {"weights": weight_bytes(entry.model)}
        activations = inference_peak(entry.model, workload.largest)
        yield "scoring", _sum(*resident, loaded, {"activations": activations})
    first = [*trained, *frozen][0]
    if workload.generations and first.model.loss != SCORE:
        sampling = _sampling_memory(first, workload.generations[0], gpu_memory)
        yield "sampling", _sum(*resident, sampling)


def _sum(*memories: Memory) -> Memory:
    """Return the sum of memories by component."""
    return {name: sum(memory.get(name, 0) for memory in memories) for name in COMPONENTS}


def resident_memory(entry: LoadedModel, placement: Placement) -> Memory:
    """Return what a process holds of a trained model at all times.

    Of weights with adapters, few are trained. Offloaded tensors are in the CPU's memory.
    """
    size, processes = measure_size(entry.model), num_processes(placement)
    width = BYTES_PER_ELEMENT[entry.model.dtype]
    divided = processes if entry.stage == 3 else 1
    frozen = width * (size.weights - size.trained) / divided
    training = training_bytes(entry.stage, processes) * size.trained
    if placement.offload == "optimizer":
        training = width * size.trained / divided
    if placement.offload == "parameters":
        frozen = training = 0
    return {"weights": frozen, "training": training}


def _layer(entry: LoadedModel) -> Memory:
    """Return the whole weights of a layer, which stage 3 gathers."""
    if entry.stage < 3:
        return {}
    size = measure_size(entry.model)
    return {"weights": BYTES_PER_ELEMENT[entry.model.dtype] * max(size.layer, size.largest)}


def _sampling_memory(entry: LoadedModel, generation: Generation, gpu_memory: float) -> Memory:
    """Return what generation adds to a model: vLLM, or keys, values and gathered weights."""
    model, shape = entry.model, generation.shape
    if generation.vllm_ranks:
        return vllm_memory(model, gpu_memory, generation.vllm_ranks)
    gathered = _layer(entry)
    if entry.stage == 3 and samples_whole(weight_bytes(model), gpu_memory):
        gathered = {"weights": weight_bytes(model)}
    # Keys and values of all tokens, and of the prompts of the next batch; the pass of the prompts;
    # the last logits of each row, in the dtype and three times in fp32.
    length = shape.length - shape.targets
    prompts = shape._replace(length=length, targets=length)
    width = BYTES_PER_ELEMENT[model.dtype]
    logits = shape.sequences * measure_size(model).vocabulary * (width + 12)
    forward = inference_peak(model._replace(loss=SCORE), prompts)
    cache = cache_bytes(model, shape) * (1 + length / shape.length)
    return _sum(gathered, {"cache": cache, "activations": forward + logits})


def gathers_each_token(workload: Workload, gpu_memory: float) -> bool:
    """Return whether a training at ZeRO stage 3 samples from weights that it gathers by layers."""
    if not (workload.trained and workload.generations):
        return False
    actor, generation = workload.trained[0], workload.generations[0]
    is_whole = samples_whole(weight_bytes(actor.model), gpu_memory)
    return actor.stage == 3 and not generation.vllm_ranks and not is_whole


def vllm_memory(model: ModelSpec, gpu_memory: float, num_ranks: int) -> Memory:
    """Return what a vLLM engine of a number of processes takes of a GPU while it is awake.

    Its share of the weights, and keys and values in the rest of its fraction of the memory.
    """
    weights = weight_bytes(model) / num_ranks
    return {"weights": weights, "cache": max(GPU_MEMORY_FRACTION * gpu_memory - weights, 0)}


def vllm_fits(generation: Generation, gpu_memory: float) -> bool:
    """Return whether vLLM, if it samples, has memory for its weights and one response."""
    if not generation.vllm_ranks:
        return True
    response = cache_bytes(generation.model, generation.shape._replace(sequences=1))
    needed = (weight_bytes(generation.model) + response) / generation.vllm_ranks
    return needed <= GPU_MEMORY_FRACTION * gpu_memory


def weight_bytes(model: ModelSpec) -> int:
    """Return the bytes of all weights of a model; of a saved one with LoRA, adapters included."""
    return BYTES_PER_ELEMENT[model.dtype] * measure_size(model).weights


def cache_bytes(model: ModelSpec, shape: BatchShape) -> int:
    """Return the bytes of the keys and values of all tokens of a batch."""
    width = BYTES_PER_ELEMENT[model.dtype]
    return width * measure_size(model).kv * shape.sequences * shape.length


def result_bytes(workload: Workload, save_dtype: str | None) -> float:
    """Return the bytes of the trained model; nan for a job that trains none.

    save_dtype: The dtype of the files. Defaults to the dtype of training.
    """
    if not workload.trained:
        return math.nan
    model = workload.trained[0].model
    return (2 if workload.ema else 1) * weight_bytes(
        model._replace(dtype=save_dtype or model.dtype)
    )


def checkpoint_bytes(workload: Workload) -> int:
    """Return the bytes of a training state: master weights and moments of all trained weights."""
    return sum(12 * measure_size(entry.model).trained for entry in workload.trained)
