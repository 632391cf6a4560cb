"""Memory of a process that runs models, measured without them.

It is the peak: what the process holds at all times, and what the largest moment adds. A trained
weight takes 16 bytes, which the processes divide as ZeRO does. For activations, a model of a few
layers is built of torch's fake tensors, which have shapes and no data, and runs a forward and
backward pass as in training, while the lifetime of each storage is tracked. All layers are alike:
what a third layer adds to two, every further layer adds too.
"""

import json
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

from snakechat.modeling.attention import Segments, Spans
from snakechat.modeling.batching import TokenBatch
from snakechat.modeling.forward import Policy, Scorer
from snakechat.modeling.generation import cache_elements
from snakechat.modeling.loading import add_lora
from snakechat.modeling.models import (
    DTYPES,
    GPU_CHUNK_LOGITS,
    Acceleration,
    accelerated,
    checkpoint_activations,
)
from snakechat.modeling.vllm_sampler import GPU_MEMORY_FRACTION
from snakechat.training.rungs import samples_whole, training_bytes
from snakechat.workflow.errors import InputError
from snakechat.workflow.processes import Placement

# Numbers of layers of the two small models that are measured.
SMALL_DEPTHS = (2, 3)
# Losses: SFT (sum of log-probabilities), RLHF and DPO (log-probabilities of tokens), reward models
# and critics (scores).
SFT, POLICY, SCORE = "sft", "policy", "score"

# Bytes by component: weights, of models or parts of them that are not trained; training: weights,
# gradients and optimizer states of the others; activations; cache: keys and values; vllm.
Memory = Counter[str]


class ModelSpec(NamedTuple):
    """A model and how it is trained.

    config: the transformers config as JSON text. loss: SFT, POLICY or SCORE. dtype: of its weights
    and activations. lora_rank, train_base, activation_checkpointing: as in a recipe.
    """

    config: str
    loss: str
    dtype: str
    lora_rank: int = 0
    train_base: str = "none"
    activation_checkpointing: bool = False

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return DTYPES[self.dtype].itemsize

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; of a saved model with LoRA, adapters included."""
        return self.width * measure_size(self)["weights"]


class BatchShape(NamedTuple):
    """Shape of a micro-batch.

    sequences: number of packed sequences. length: tokens of each. targets: tokens of each that are
    trained on, scored or generated. dense_mask: whether attention has a mask of all pairs of
    tokens; false if another kernel than SDPA computes it.
    """

    sequences: int
    length: int
    targets: int
    dense_mask: bool = True


class Run(NamedTuple):
    """What a job runs of a model.

    stage: The ZeRO stage at which the processes partition it.
    forwards: Forward passes over each row, besides training.
    epochs: Passes over each row that train it; 0 for a frozen model.
    samples: Whether it samples the responses of the workload.
    """

    model: ModelSpec
    stage: int
    forwards: int = 0
    epochs: int = 0
    samples: bool = False


class Workload(NamedTuple):
    """What a job runs. Numbers of rows and responses are nan if they are unknown.

    runs: Its models, those that are trained first.
    rows: Rows of all passes.
    length: Mean tokens of a row.
    attended: Mean length of the sequences in which attention is computed.
    largest: Its largest micro-batch.
    responses: Responses of each model that samples, in all processes.
    sampled: The largest batch of responses.
    vllm_ranks: Processes of a vLLM engine that samples; 0 if the model itself does.
    ema: Whether it keeps a moving average of the first model.
    one_at_a_time: Whether it has one of its models in memory at a time.
    notes: Assumptions, for the user.
    """

    runs: list[Run]
    rows: float
    length: float
    attended: float
    largest: BatchShape
    responses: float = 0
    sampled: BatchShape = BatchShape(1, 1, 1)
    vllm_ranks: int = 0
    ema: bool = False
    one_at_a_time: bool = False
    notes: Sequence[str] = ()


@cache
def measure_size(model: ModelSpec) -> dict[str, int]:
    """Return numbers of elements of a model, by names that run.json has where it has them.

    weights: all weights. trained: the trained ones. largest: the largest tensor. layer: one layer.
    kv: keys and values of a token in all layers. layers, hidden_size: as in the config.
    """
    config = load_config(model)
    modules = [build_model(model, layers) for layers in SMALL_DEPTHS]
    sizes = [{each: each.numel() for each in module.parameters()} for module in modules]
    weights = [sum(of.values()) for of in sizes]
    trained = [sum(n for each, n in of.items() if each.requires_grad) for of in sizes]
    return {
        "weights": _extrapolate(weights, config.num_hidden_layers),
        "trained": _extrapolate(trained, config.num_hidden_layers),
        "largest": max(sizes[0].values()),
        "layer": weights[1] - weights[0],
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "kv": cache_elements(config),
    }


@cache
def activation_peak(model: ModelSpec, shape: BatchShape, trains: bool) -> int:
    """Return the peak bytes of a forward pass and, if the model is trained, of backward.

    They come on top of the weights. Gradients of weights do not count, except for the one that is
    being computed.
    """
    peaks = [_measure_peak(model, depth, shape, trains) for depth in SMALL_DEPTHS]
    return _extrapolate(peaks, load_config(model).num_hidden_layers)


def _extrapolate(values: Sequence[int], layers: int) -> int:
    """Extrapolate a value from the two small models to a number of layers."""
    return values[0] + (layers - SMALL_DEPTHS[0]) * (values[1] - values[0])


def load_config(model: ModelSpec, layers: int | None = None) -> PreTrainedConfig:
    """Return the config of a model without dropout, optionally with another number of layers.

    Raises:
        InputError: transformers rejects the config.
    """
    try:
        config = AutoConfig.for_model(**json.loads(model.config) | {"num_labels": 1})
    except (ValueError, TypeError) as error:
        # transformers lists all types that it has.
        reason = str(error).splitlines()[0].partition(". Should contain")[0]
        raise InputError(f"invalid config of a model: {reason}") from None
    if layers:
        config.num_hidden_layers = layers
    if layers and getattr(config, "layer_types", None):
        # Repeated, for a model with fewer layers than are measured.
        config.layer_types = (config.layer_types * layers)[:layers]
    config.update({name: 0.0 for name, v in config.to_dict().items() if "drop" in name and v})
    return config


def build_model(model: ModelSpec, layers: int) -> Policy | Scorer:
    """Return a trainable model with a number of layers on the meta device."""
    is_scorer, dtype = model.loss == SCORE, DTYPES[model.dtype]
    auto_class = AutoModelForSequenceClassification if is_scorer else AutoModelForCausalLM
    with torch.device("meta"):
        network = auto_class.from_config(load_config(model, layers), dtype=dtype)
        if model.lora_rank:
            network = add_lora(network, model.lora_rank, 1, model.train_base)
    if model.activation_checkpointing:
        checkpoint_activations(network)
    for weight in network.parameters():
        weight.data = weight.data.to(dtype)
    # Whatever this process chose, the layers are not compiled.
    with accelerated(Acceleration()):
        return (Scorer if is_scorer else Policy)(network).train()


def _measure_peak(model: ModelSpec, layers: int, shape: BatchShape, trains: bool) -> int:
    """Return the peak bytes of a pass of a model with a number of layers, of fake tensors."""
    module = build_model(model, layers)
    # The fake tensors are on the CPU.
    choices = Acceleration(
        chunk_logits=GPU_CHUNK_LOGITS,
        fp32_chunk_logits=GPU_CHUNK_LOGITS,
        attn_implementation="sdpa" if shape.dense_mask else "auto",
    )
    with FakeTensorMode(allow_non_fake_inputs=True), accelerated(choices):
        module.to_empty(device="cpu")
        module.model.tie_weights()
        for weight in module.parameters():
            if weight.requires_grad:
                # Engines take each gradient as it is computed; estimates count them separately.
                weight.register_post_accumulate_grad_hook(lambda w: setattr(w, "grad", None))
        batch = _fake_batch(module, shape)
        with MemoryTracker(module) as tracker, torch.set_grad_enabled(trains):
            # The loss of SFT, or a sum that takes as much memory as another loss.
            arguments = [batch.state_index] if model.loss == SCORE else []
            options = {"return_sum": True} if model.loss == SFT else {}
            loss = module(batch, *arguments, **options).sum()
            if trains:
                loss.backward()
    return tracker.peak


def _fake_batch(module: Policy | Scorer, shape: BatchShape) -> TokenBatch:
    """Return a batch without padding whose packed sequences have one response each."""
    number, length = shape[:2]
    ids, targets, ends = (
        torch.zeros(size, dtype=torch.int64)
        for size in ((number, length), number * shape.targets, number)
    )
    batch = TokenBatch(ids, targets, targets, ends, ends)
    if not module.supports_packing:
        return batch
    own = Spans(torch.zeros(number + 1, dtype=torch.int32), length)
    return batch._replace(position_ids=ids, segments=Segments(ids, ids, own))


class MemoryTracker(TorchDispatchMode):
    """Tracks the bytes of all storages that are created in its context while they live.

    Attributes:
        bytes, peak: Bytes now, and the most so far. The weights of the module do not count.
    """

    bytes = peak = 0

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        # By address. Storages of the module are here from the start and are not counted.
        self.storages: dict[int, Any] = {}
        for tensor in (*module.parameters(), *module.buffers()):
            self.storages[tensor.untyped_storage()._cdata] = tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._track(tensor.untyped_storage())
        return outputs

    def _track(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.storages:
            return

        def release(_: Any) -> None:
            self.bytes -= size
            del self.storages[key]

        self.storages[key] = weakref.ref(storage, release)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


# --- memory of a job ------------------------------------------------------------------------------


def peak_memory(workload: Workload, placement: Placement, gpu_memory: float) -> tuple[str, Memory]:
    """Return the moment of peak memory of a process, and its memory."""
    groups = [[run] for run in workload.runs] if workload.one_at_a_time else [workload.runs]
    moments: list[tuple[str, Memory]] = []
    for runs in groups:
        resident, first = _resident(runs, workload.ema, placement), runs[0]
        for run in runs:
            added = Memory(activations=activation_peak(run.model, workload.largest, run.epochs > 0))
            if run.stage == 3:
                # A whole layer is gathered.
                size = measure_size(run.model)
                added["weights"] = run.model.width * max(size["layer"], size["largest"])
            elif first.epochs and not run.epochs and placement.offload_frozen:
                added["weights"] = run.model.weight_bytes
            moments.append(("training" if run.epochs else "scoring", resident + added))
        if first.samples:
            # By default, keys and values take what is free.
            tokens, weights = placement.generate_tokens or 0, first.model.weight_bytes
            added = Memory(cache=tokens * first.model.width * measure_size(first.model)["kv"])
            if workload.vllm_ranks:
                added = Memory(vllm=int(GPU_MEMORY_FRACTION * gpu_memory))
            elif first.stage == 3 and samples_whole(weights, gpu_memory):
                added["weights"] = weights
            moments.append(("sampling", resident + added))
    return max(moments, key=lambda moment: moment[1].total())


def _resident(runs: list[Run], ema: bool, placement: Placement) -> Memory:
    """Return what a process holds of models at all times. Offloaded tensors are on the CPU."""
    found, processes = Memory(), placement.num_processes
    offloads_all = placement.offload == "parameters"
    offloads_frozen = placement.offload_frozen if runs[0].epochs else offloads_all
    for run in runs:
        size, width = measure_size(run.model), run.model.width
        divided = processes if run.stage == 3 else 1
        if run.epochs and not offloads_all:
            # With adapters, few of the weights are trained.
            per_weight = training_bytes(run.stage, processes, run.model.dtype)
            if placement.offload == "optimizer":
                per_weight = width / divided
            found["training"] += int(per_weight * size["trained"])
            found["weights"] += width * (size["weights"] - size["trained"]) // divided
        elif not run.epochs and not offloads_frozen:
            found["weights"] += width * size["weights"] // divided
    if ema:
        divided = processes if runs[0].stage else 1
        found["training"] += 4 * measure_size(runs[0].model)["trained"] // divided
    return found
