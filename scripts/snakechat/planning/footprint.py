"""What a model takes, without the model: its weights and the memory of its passes, in bytes.

A model of few layers is built of torch's fake tensors, which have shapes and no numbers, and a pass
goes through it as in training; each storage is followed from its making to its end. All layers are
alike: what a third one adds to two, each further one adds too.
"""

import contextlib
import json
import weakref
from functools import cache
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification

from snakechat.modeling import logprobs
from snakechat.modeling.packing import ModelInputs, TokenBatch
from snakechat.modeling.forward import Policy, Scorer
from snakechat.modeling.lora import add_lora
from snakechat.modeling.models import DTYPES
from snakechat.workflow.errors import InputError

# Layers of the two models that are looked at.
FEW = (2, 3)
# The losses that passes are made for: of SFT (summed log-probabilities), of RLHF and DPO
# (log-probabilities of tokens), of reward models and critics (scores).
SFT, POLICY, SCORE = "sft", "policy", "score"


class Model(NamedTuple):
    """A model and how it is trained.

    config: its transformers config, as JSON text. loss: SFT, POLICY or SCORE. dtype: of its passes.
    lora_rank, train_base: as in a recipe. checkpointing: whether activations are made anew.
    """

    config: str
    loss: str
    dtype: str
    lora_rank: int = 0
    train_base: str = "none"
    checkpointing: bool = False


class Size(NamedTuple):
    """Numbers of a model.

    weights: in all; trained: of those, the trained; largest: of its largest tensor; layer: of one
    layer. kv: keys and values that a token leaves in all layers. vocabulary: of its output layer, 0
    where there is none.
    """

    weights: int
    trained: int
    largest: int
    layer: int
    layers: int
    hidden_size: int
    kv: int
    vocabulary: int


class Layout(NamedTuple):
    """What a pass is made of: lines of length tokens, of each so many that are learnt, judged or
    sampled; and whether it is made on a GPU.
    """

    lines: int
    length: int
    learnt: int
    gpu: bool = True


@cache
def size_of(model):
    """The Size of a Model."""
    config = config_of(model)
    few = [_counts(build(model, layers)) for layers in FEW]
    layers = config.num_hidden_layers
    weights, trained = (_at(found, layers) for found in zip(*few, strict=True))
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Size(
        weights=weights,
        trained=trained,
        largest=max(weight.numel() for weight in build(model, FEW[0]).parameters()),
        layer=few[1][0] - few[0][0],
        layers=layers,
        hidden_size=config.hidden_size,
        kv=2 * layers * heads * width,
        vocabulary=0 if model.loss == SCORE else config.vocab_size,
    )


@cache
def asked_bytes(model, layout):
    """Bytes, beyond the weights, at the peak of a Model's pass without gradients."""
    return _extended(model, lambda layers: [_asked(model, layers, layout)])[0]


@cache
def trained_bytes(model, layout):
    """The same of a pass that is trained on: up to its loss, and behind it (forward, backward).

    Gradients of weights are not among them, but for one that is being made. An activation that
    lasts is in both.
    """
    return _extended(model, lambda layers: _trained(model, layers, layout))


def _extended(model, look):
    """What a function of a few layers finds, of all layers of a Model."""
    layers = config_of(model).num_hidden_layers
    few = [look(some) for some in FEW]
    return [_at(found, layers) for found in zip(*few, strict=True)]


def _at(found, layers):
    """What a model of so many layers has, from what the two small ones have."""
    return found[0] + (layers - FEW[0]) * (found[1] - found[0])


def _counts(module):
    """Weights of a module: all, and those trained."""
    sizes = [(weight.numel(), weight.requires_grad) for weight in module.parameters()]
    return (
        sum(size for size, _ in sizes),
        sum(size for size, is_trained in sizes if is_trained),
    )


def config_of(model, layers=None):
    """The config of a Model, or of one of fewer layers, without dropout.

    Raises InputError where transformers does not take it.
    """
    keys = json.loads(model.config) | {"num_labels": 1}
    try:
        config_class = CONFIG_MAPPING[keys["model_type"]]
        if layers:
            keys[config_class.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = layers
            if "layer_types" in keys:
                keys["layer_types"] = keys["layer_types"][:layers]
        config = config_class(**keys)
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"no config of a model: {str(error).splitlines()[0]}") from None
    for name, value in config.to_dict().items():
        if "drop" in name and value:
            setattr(config, name, 0.0)
    return config


def build(model, layers):
    """A Model of some layers, on the meta device, ready to train: a Policy or a Scorer."""
    kind, auto_class = (
        (Scorer, AutoModelForSequenceClassification)
        if model.loss == SCORE
        else (Policy, AutoModelForCausalLM)
    )
    config = config_of(model, layers)
    with torch.device("meta"):
        network = auto_class.from_config(config, dtype=DTYPES[model.dtype])
        if model.lora_rank:
            network = add_lora(network, model.lora_rank, 1, model.train_base)
    if model.checkpointing:
        network.activation_checkpointing_enable({"use_reentrant": False})
    for weight in network.parameters():
        weight.data = weight.data.to(DTYPES[model.dtype])
    return kind(network).train()


def _asked(model, layers, layout):
    with fakes(model, layers, layout) as (module, grid, live), torch.no_grad():
        ask(model, module, grid)
        return live.peak()


def _trained(model, layers, layout):
    with fakes(model, layers, layout) as (module, grid, live):
        loss = ask(model, module, grid)
        forward = live.peak()
        loss.backward()
        return forward, live.peak()


@contextlib.contextmanager
def fakes(model, layers, layout):
    """A Model of some layers and a grid, of fake tensors, and a Live that follows what is made."""
    module = build(model, layers)
    # A GPU turns a whole chunk of logits into fp32 at once: see snakechat/modeling/logprobs.py.
    table = logprobs.FP32_CHUNK_LOGITS
    logprobs.FP32_CHUNK_LOGITS = logprobs.CHUNK_LOGITS if layout.gpu else table
    try:
        with FakeTensorMode():
            fill(module)
            for weight in module.parameters():
                if weight.requires_grad:
                    # As engines take gradients away, one by one: they are counted apart.
                    weight.register_post_accumulate_grad_hook(drop_gradient)
            grid = a_grid(module, layout)
            with Live(module) as live:
                yield module, grid, live
    finally:
        logprobs.FP32_CHUNK_LOGITS = table


def fill(module):
    """Put fake tensors in the places of those on the meta device, shared ones as before."""
    made = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in made:
                    made[tensor] = torch.empty(tensor.shape, dtype=tensor.dtype)
                    if isinstance(tensor, nn.Parameter):
                        made[tensor] = nn.Parameter(made[tensor], tensor.requires_grad)
                tensors[name] = made[tensor]


def drop_gradient(weight):
    """Forget the gradient of a weight."""
    weight.grad = None


def a_grid(module, layout):
    """A Grid of full lines, of one sequence each."""
    lines, length, learnt, _ = layout

    def ids(*shape):
        return torch.zeros(shape, dtype=torch.int64)

    inputs = ModelInputs(ids(lines, length))
    if module.supports_packing:
        mask = torch.ones(lines, 1, length, length, dtype=torch.bool)
        inputs = ModelInputs(ids(lines, length), ids(lines, length), mask)
    return TokenBatch(inputs, ids(lines * learnt), ids(lines * learnt), ids(lines), ids(lines))


def ask(model, module, grid):
    """The loss of a pass, or something that takes as much memory."""
    if model.loss == SFT:
        return module(grid, return_sum=True)
    return (module(grid) if model.loss == POLICY else module(grid, grid.state_index)).sum()


class Live(TorchDispatchMode):
    """Follows the bytes of all storages that are made while it lasts, from making to end."""

    def __init__(self, module):
        super().__init__()
        self.bytes = self.largest = 0
        self.known = {}
        # These are not counted.
        for tensor in (*module.parameters(), *module.buffers()):
            self.known[tensor.untyped_storage()._cdata] = tensor

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor.untyped_storage())
        return made

    def _follow(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return

        def forget(_):
            self.bytes -= size
            del self.known[key]

        self.known[key] = weakref.ref(storage, forget)
        self.bytes += size
        self.largest = max(self.largest, self.bytes)

    def peak(self):
        """The most bytes at a time since this was asked last."""
        largest, self.largest = self.largest, self.bytes
        return largest
