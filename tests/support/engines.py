"""Engines of a small network, and steps that train it."""

from types import SimpleNamespace

import torch
from torch import nn

from snakechat.training.placed_models import make_engine
from snakechat.workflow.processes import Placement

# After snakechat, which sets DS_ACCELERATOR.
import deepspeed  # isort: skip

SETTINGS = {
    "weight_decay": 0.1,
    "lora_learning_rate": None,
    "adam_betas": [0.9, 0.95],
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "min_lr_ratio": 0.0,
    "max_grad_norm": 1.0,
    "dtype": "fp32",
}
RATE = 0.01


def network():
    """Return matrices, biases and a norm, with the same weights at each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1))


def engine_for(module, num_steps=100, zero_stage=0, rate=RATE, **changes):
    settings = SimpleNamespace(**{**SETTINGS, **changes})
    return make_engine(module, settings, rate, num_steps, Placement(zero_stage=zero_stage))


def plain_optimizer(module):
    """Return the optimizer of a module in plain PyTorch."""
    groups = [
        {"params": [w for w in module.parameters() if w.ndim > 1], "weight_decay": 0.1},
        {"params": [w for w in module.parameters() if w.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))


def rows(number, seed=1):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(number, 4, generator=random), torch.randn(number, 1, generator=random)


def squared_error(output, targets, number):
    """Return the contribution of a micro-batch to the mean of a step."""
    return (output - targets).square().sum() / number


def weights_of(module):
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return torch.cat([weight.detach().flatten().clone() for weight in module.parameters()])


def run_step(engine, inputs, targets, micro_batches):
    """Take one optimizer step whose rows are divided into micro-batches."""
    groups = list(zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
    for number, (group_inputs, group_targets) in enumerate(groups, start=1):
        loss = squared_error(engine(group_inputs), group_targets, len(inputs))
        engine.backward(loss, last=number == len(groups))
    engine.step()
