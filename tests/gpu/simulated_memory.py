"""Two steps of trainings at real size on tensors without data, and their peak memory.

Prints JSON: for each training, the peak bytes of its tensors on the GPU, and the estimated peak.
"""

import contextlib
import json
import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

from gpu.workloads import SHAPES
from snakechat.estimates.activation_memory import (
    BatchShape,
    MemoryTracker,
    ModelSpec,
    build_model,
    replace_meta_tensors,
)
from snakechat.estimates.job_estimate import Run, Workload, peak_memory
from snakechat.modeling import acceleration
from snakechat.modeling.acceleration import Acceleration
from snakechat.modeling.batching import Examples
from snakechat.training import engine as engines
from snakechat.workflow.placement import Placement
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
    placement = Placement(gpus_per_node=1, activation_checkpointing=checkpointing)
    text = json.dumps(AutoConfig.for_model(**config).to_dict())
    specs = [ModelSpec(text, loss, "bf16", lora_rank, "none", checkpointing) for loss in losses]
    modules = [build_model(spec, config["num_hidden_layers"]) for spec in specs]
    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        tracker = stack.enter_context(MemoryTracker(torch.nn.Module()))
        stack.enter_context(acceleration.using(Acceleration(ROWS * LENGTH, pad_to_multiple_of=128)))
        for owner, attribute, value in (
            (torch.Tensor, "pin_memory", lambda tensor, *_: tensor),
            (engines.nn.utils, "get_total_norm", lambda _: SimpleNamespace(item=lambda: 0.5)),
            (torch.nn.functional, "scaled_dot_product_attention", attention),
        ):
            stack.enter_context(mock.patch.object(owner, attribute, value))
        trained = []
        for loss, module in zip(losses, modules, strict=True):
            replace_meta_tensors(module, device)
            trained.append((loss, engines.Engine(module, settings, 1e-5, 2)))
        for loss, engine in trained * 2:
            for micro_batch in examples.micro_batches(np.arange(ROWS), True, device, loss == "sft"):
                batch = micro_batch.batch
                if loss == "sft":
                    value = engine(batch, return_sum=True)
                else:
                    value = engine(*([batch, batch.last_index] if loss == "score" else [batch]))
                engine.backward(value.sum() * -1e-3, micro_batch.is_last)
                del value
            engine.step()
    targets = LENGTH - 1 if losses == ["sft"] else RESPONSE
    runs = [Run(spec, 0, epochs=1) for spec in specs]
    workload = Workload(runs, 0, LENGTH, LENGTH, BatchShape(ROWS, LENGTH, targets))
    _, estimated = peak_memory(workload, placement, 0)
    return {"peak": tracker.peak, "estimate": sum(estimated.values())}


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_):
    """Return what the memory-efficient kernel of a GPU returns, with what it keeps."""
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    bias = torch.where(attn_mask, zero, -math.inf).to(query.dtype)
    bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, True, 0.0, is_causal, scale=scale)[0]


if __name__ == "__main__":
    print(json.dumps({name: peaks(*case) for name, case in CASES.items()}))
