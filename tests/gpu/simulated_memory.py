"""Two steps of trainings at real size on tensors without data, and their peak memory.

Prints JSON: for each training, the peak bytes of its tensors on the GPU, and the estimated peak.
"""

import contextlib
import json
import math
import weakref
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from gpu.workloads import SHAPES
from snakechat.estimates.activation_memory import BatchShape, ModelSpec
from snakechat.estimates.job_estimate import Run, Workload, peak_memory
from snakechat.modeling import acceleration
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, Scorer
from snakechat.modeling.lora import add_lora
from snakechat.training import engine as engines
from snakechat.workflow.placement import placement_of
from support.engines import SETTINGS

OPT = SHAPES["opt-1.3b"]
LLAMA = {"model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048, "head_dim": 64}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192}
LLAMA |= {"vocab_size": 128256, "tie_word_embeddings": True, "max_position_embeddings": 8192}
# Losses of the trained models, the config of each, rank of adapters, activation checkpointing.
CASES = {
    "sft, checkpointing": (["sft"], OPT, 0, True),
    "dpo, lora": (["policy"], LLAMA, 64, False),
    "ppo": (["policy", "score"], OPT, 0, False),
}
# Number of rows in a micro-batch, tokens per row, and tokens per response.
ROWS, LENGTH, RESPONSE = 8, 1024, 512


def peaks(losses, config, lora_rank, checkpointing):
    """Return the peak of two steps that train models one after the other, and its estimate."""
    settings = SimpleNamespace(**{**SETTINGS, "dtype": "bf16"})
    device = torch.device("cuda", 0)
    examples = Examples([[5] * (LENGTH - RESPONSE)] * ROWS, [[7] * RESPONSE] * ROWS)
    placement = placement_of({"gpus_per_node": 1, "activation_checkpointing": checkpointing})
    choices = acceleration.Acceleration(pad_to_multiple_of=128)
    norm = SimpleNamespace(item=lambda: 0.5)
    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        storages = stack.enter_context(tracked_storages())
        stack.enter_context(acceleration.using(choices))
        for owner, attribute, value in (
            (torch.Tensor, "pin_memory", lambda tensor, *_: tensor),
            (engines.nn.utils, "get_total_norm", lambda _: norm),
            (torch.nn.functional, "scaled_dot_product_attention", attention),
        ):
            stack.enter_context(mock.patch.object(owner, attribute, value))
        trained = []
        for loss in losses:
            module = make_module(config, loss, lora_rank, device)
            if checkpointing:
                module.model.gradient_checkpointing_enable({"use_reentrant": False})
            trained.append((loss, engines.ReplicatedEngine(module.train(), settings, 1e-5, 2)))
        for _ in range(2):
            for loss, engine in trained:
                for micro_batch in examples.micro_batches(
                    np.arange(ROWS), ROWS * LENGTH, True, device, loss == "sft"
                ):
                    batch = micro_batch.batch
                    if loss == "sft":
                        value = engine(batch, return_sum=True)
                    elif loss == "score":
                        value = engine(batch, batch.last_index).sum()
                    else:
                        value = engine(batch).sum()
                    engine.backward(value * -1e-3, micro_batch.is_last)
                    del value
                engine.step()
    text = json.dumps(AutoConfig.for_model(**config).to_dict())
    specs = [ModelSpec(text, loss, "bf16", lora_rank, "none", checkpointing) for loss in losses]
    targets = LENGTH - 1 if losses == ["sft"] else RESPONSE
    runs = [Run(spec, 0, epochs=1) for spec in specs]
    workload = Workload(runs, 0, LENGTH, BatchShape(ROWS, LENGTH, targets))
    _, estimated = peak_memory(workload, placement)
    return {"peak": storages.peak, "estimate": sum(estimated.values())}


def make_module(config, loss, lora_rank, device):
    """Return a policy or a scorer whose weights have no data."""
    config = AutoConfig.for_model(**config, num_labels=1, pad_token_id=1)
    config._attn_implementation = "sdpa"
    family = AutoModelForSequenceClassification if loss == "score" else AutoModelForCausalLM
    with _disable_current_modes(), torch.device("meta"):
        model = family.from_config(config, dtype=torch.bfloat16)
        if lora_rank:
            model = add_lora(model, lora_rank, 2 * lora_rank)
    empty = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in empty:
                    dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
                    new = torch.empty(tensor.shape, dtype=dtype, device=device)
                    if isinstance(tensor, torch.nn.Parameter):
                        new = torch.nn.Parameter(new, tensor.requires_grad)
                    empty[tensor] = new
                if tensor is not None:
                    tensors[name] = empty[tensor]
    return Scorer(model) if loss == "score" else Policy(model)


@contextlib.contextmanager
def tracked_storages():
    """Context that follows the storages of tensors on the GPU; yields their peak."""
    sizes, result = {}, SimpleNamespace(now=0, peak=0)

    def free(key):
        result.now -= sizes.pop(key)

    class Tracker(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in tree_leaves(out):
                if getattr(tensor, "device", None) is not None and tensor.device.type == "cuda":
                    storage = tensor.untyped_storage()
                    key = storage._cdata
                    if key not in sizes:
                        # As CUDA's allocator rounds.
                        sizes[key] = math.ceil(storage.nbytes() / 512) * 512
                        weakref.finalize(storage, free, key)
                        result.now += sizes[key]
                        result.peak = max(result.peak, result.now)
            return out

    with Tracker():
        yield result


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_):
    """Return what the memory-efficient kernel of a GPU returns, with what it keeps."""
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    bias = torch.where(attn_mask, zero, -math.inf).to(query.dtype)
    bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, True, 0.0, is_causal, scale=scale)[0]


if __name__ == "__main__":
    print(json.dumps({name: peaks(*case) for name, case in CASES.items()}))
