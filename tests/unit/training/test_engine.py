"""Optimizer steps of the engines, compared with plain PyTorch, in one process on the CPU."""

import copy
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from conftest import INIT
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy
from snakechat.modeling.models import DTYPES, make_causal
from snakechat.training.deepspeed_engine import PartitionedModel
from snakechat.training.engine import Ema, FrozenModel
from snakechat.training.placed_models import init_process_group, make_engine
from snakechat.workflow.errors import InputError
from snakechat.workflow.processes import Placement
from support.engines import (
    RATE,
    SETTINGS,
    engine_for,
    network,
    plain_optimizer,
    rows,
    run_step,
    squared_error,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("group")


def test_a_wrong_number_of_processes_is_rejected(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InputError, match=r"^placement: expected 8 processes \(.*\), 4 started: "):
        init_process_group(Placement(nodes=4, gpus_per_node=2))


@pytest.mark.parametrize("micro_batches", [1, 8])
def test_steps_of_any_number_of_micro_batches_are_those_of_torch(micro_batches):
    module, plain = network(), network()
    engine, optimizer = engine_for(module, max_grad_norm=0.1), plain_optimizer(plain)
    for seed in (1, 2, 3):
        inputs, targets = rows(8, seed)
        run_step(engine, inputs, targets, micro_batches)
        optimizer.zero_grad()
        squared_error(plain(inputs), targets, 8).backward()
        # Gradients are clipped; the norm is that before.
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()
        assert engine.grad_norm == pytest.approx(norm, abs=1e-6)
        optimizer.step()
    torch.testing.assert_close(weights_of(module), weights_of(plain), rtol=0, atol=1e-6)


@pytest.mark.parametrize("recomputes", [False, True])
def test_activation_checkpointing_runs_each_layer_twice(recomputes, tokenizer):
    policy = Policy(make_causal(INIT, tokenizer, 1))
    placement = Placement(activation_checkpointing=recomputes)
    engine = make_engine(policy, SimpleNamespace(**SETTINGS), RATE, 1, placement)
    runs = []
    for layer in policy.model.model.decoder.layers:
        layer.fc1.register_forward_pre_hook(lambda *_: runs.append(1))
    examples = Examples([[5, 6]], [[7, 8, 2]])
    [micro_batch] = examples.micro_batches(np.arange(1), True, torch.device("cpu"))
    engine.backward(-engine(micro_batch.batch, return_sum=True), True)
    assert len(runs) == INIT["num_hidden_layers"] * (2 if recomputes else 1)


def test_grad_norm_of_a_large_gradient_is_accurate():
    # One sum of 16 million squares in fp32 would be wrong by 7e-4.
    module = nn.Linear(1 << 12, 1 << 12, bias=False)
    engine = engine_for(module)
    slopes = torch.randn(1 << 12, generator=torch.Generator().manual_seed(1))
    engine.backward(engine(slopes).sum(), last=True)
    engine.step()
    # The gradient has the slopes in each of its rows.
    norm = math.sqrt(1 << 12) * slopes.double().norm().item()
    assert engine.grad_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_adapters_follow_the_schedule_with_lora_learning_rate(zero_stage):
    # Adam's first step is the rate times the sign of the gradient.
    module = nn.Linear(1, 1)
    module.lora_A = nn.Parameter(torch.ones(1, 1))
    module.forward = lambda inputs: module.weight * inputs + module.bias + module.lora_A
    start = {name: weight.item() for name, weight in module.named_parameters()}
    changes = {"weight_decay": 0.0, "lr_schedule": "linear", "lora_learning_rate": 0.05}
    engine = engine_for(module, num_steps=2, zero_stage=zero_stage, **changes)
    engine.backward(engine(torch.ones(1)).sum(), last=True)
    engine.step()
    with engine.gathered(list(module.parameters())):
        moved = {name: start[name] - weight.item() for name, weight in module.named_parameters()}
    expected = {"weight": RATE, "bias": RATE, "lora_A": 0.05}
    assert moved == {name: pytest.approx(rate, abs=1e-6) for name, rate in expected.items()}
    assert [group["lr"] for group in engine.optimizer.param_groups] == [RATE / 2] * 2 + [0.025]


def layer(dtype, zero_stage=0, **changes):
    """Return a layer with weights of 0.5, its engine and ones as inputs."""
    module = nn.Linear(2, 1, bias=False).to(DTYPES[dtype])
    nn.init.constant_(module.weight, 0.5)
    # Like the angles of rotary positions, which rounding would change.
    module.register_buffer("angle", torch.tensor(1 / 3))
    changes = {"weight_decay": 0.0, **changes}
    engine = engine_for(module, zero_stage=zero_stage, dtype=dtype, **changes)
    return module, engine, torch.ones(1, 2, dtype=DTYPES[dtype])


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_an_fp16_step_that_overflows_is_skipped_and_the_loss_scale_halved(zero_stage, fp16_on_cpu):
    module, engine, inputs = layer("fp16", zero_stage, lr_schedule="linear")
    assert engine.metrics["loss_scale"] == 65536
    # The largest fp16 number is 65,504; DeepSpeed lowers the scale at the second overflow.
    for skipped in (1, 2):
        engine.backward(engine(inputs).float().sum(), last=True)
        engine.step()
        assert (engine.metrics["skipped_steps"], engine.grad_norm) == (skipped, None)
    assert weights_of(module).tolist() == [0.5, 0.5]
    assert (engine.metrics["loss_scale"], engine.learning_rate) == (32768, RATE)
    # A state has what decides when the scale changes again.
    state = engine.state_dict()
    _, resumed, _ = layer("fp16", zero_stage, lr_schedule="linear")
    resumed.load_state_dict({**state, "loss_scaler": json.loads(json.dumps(state["loss_scaler"]))})
    assert resumed.state_dict()["loss_scaler"] == state["loss_scaler"]
    assert state["loss_scaler"]["last_overflow_iter"] == 1 and resumed.metrics["skipped_steps"] == 2
    engine.backward(engine(inputs).float().sum(), last=True)
    engine.step()
    norm = pytest.approx(math.sqrt(2), rel=1e-3)
    assert engine.metrics == {"grad_norm": norm, "loss_scale": 32768, "skipped_steps": 2}
    assert weights_of(module).tolist() == pytest.approx([0.49, 0.49], abs=0.001)


@pytest.mark.parametrize(
    ("schedule", "min_ratio", "warmup", "factors"),
    [
        ("constant", 0.0, 2, [0, 0.5, 1, 1, 1, 1]),
        # Of six steps, the last one is five sixths of the way down.
        ("linear", 0.0, 0, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        (
            "cosine",
            0.1,
            2,
            [0, 0.5, 1, 0.55 + 0.45 / 2**0.5, 0.55, 0.55 - 0.45 / 2**0.5],
        ),
    ],
)
def test_learning_rate_schedules(schedule, min_ratio, warmup, factors):
    engine = engine_for(
        network(), num_steps=6, lr_schedule=schedule, min_lr_ratio=min_ratio, warmup_steps=warmup
    )
    rates = []
    for seed in range(6):
        rates.append(engine.learning_rate)
        run_step(engine, *rows(4, seed), micro_batches=2)
    assert rates == pytest.approx([RATE * factor for factor in factors])


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_master_values_have_what_bf16_cannot_hold_and_buffers_stay_fp32(zero_stage):
    module, engine, inputs = layer("bf16", zero_stage, rate=1e-5)
    for _ in range(10):
        engine.backward(engine(inputs).float().sum(), last=True)
        engine.step()
    # bf16 has no number between 0.498 and 0.5.
    assert module.weight.dtype == torch.bfloat16 and module.angle.dtype == torch.float32
    assert weights_of(module).float().tolist() == [0.5, 0.5]
    assert engine.master(module.weight).shape == (1, 2)
    values = engine.master(module.weight).flatten().tolist()
    assert values == pytest.approx([0.4999, 0.4999], abs=1e-6)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_gradients_of_small_bf16_micro_batches_accumulate(zero_stage):
    # One gradient of 1 and 700 of -1/520 sum to -.35, so the weights increase. In bf16, where the
    # number below 1 is 1 - 1/256, the small ones would be lost and the weights would decrease.
    module, engine, inputs = layer("bf16", zero_stage, rate=0.1)
    engine.backward(engine(inputs).float().sum(), last=False)
    for number in range(1, 701):
        engine.backward(-engine(inputs).float().sum() / 520, last=number == 700)
    engine.step()
    assert weights_of(module).float().tolist() == pytest.approx([0.6, 0.6], abs=0.003)


def test_an_offloaded_module_is_copied_to_its_device_and_never_back(monkeypatch):
    module, copies = network(), []

    def copied(tensor, device, **_):
        assert device == torch.device("cuda", 1)
        copies.append(tensor.data_ptr())
        return tensor.clone()

    def places():
        return [weight.data_ptr() for weight in module.parameters()]

    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(torch.Tensor, "to", copied)
    frozen = FrozenModel(module, torch.device("cuda", 1), offload=True)
    kept = places()
    for number in (1, 2):
        with frozen.on_device() as moved:
            assert moved is module and not set(places()) & set(kept)
        assert places() == kept and copies == kept * number


def test_a_partitioned_model_that_is_closed_has_no_weights(model):
    frozen = PartitionedModel(model, "fp32", offload=True)
    weights = list(model.parameters())
    frozen.__exit__()
    # DeepSpeed still refers to the partitions.
    partitions = [weight.ds_tensor for weight in weights]
    assert {tensor.numel() for tensor in (*weights, *partitions)} == {0}


def trained(zero_stage, dtype, shift=0.0):
    """Return a module with a frozen layer, and its engine.

    shift: Added to the trained weights, so that none is correct by chance.
    """
    module = network().to(DTYPES[dtype])
    module[0].requires_grad_(False)
    for weight in module.parameters():
        weight.data.add_(shift * weight.requires_grad)
    schedule = {"lr_schedule": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.1}
    return module, engine_for(module, 6, zero_stage, dtype=dtype, **schedule)


def masters_of(engine):
    return torch.cat([master.detach().flatten() for master in engine.master_weights])


@pytest.mark.parametrize(
    ("zero_stage", "dtype"), [(0, "fp32"), (0, "bf16"), (2, "bf16"), (3, "bf16")]
)
def test_averages_in_fp32_resume_and_leave_the_training_as_it_is(zero_stage, dtype):
    (module, plain), (averaged, engine) = (trained(zero_stage, dtype) for _ in range(2))
    ema, expected = Ema(engine, 0.75), masters_of(plain)
    for step in range(5):
        if step == 3:
            states = copy.deepcopy((engine.state_dict(), ema.state_dict()))
            averaged, engine = trained(zero_stage, dtype, shift=0.5)
            ema = Ema(engine, 0.75)
            for part, state in zip((engine, ema), states, strict=True):
                part.load_state_dict(state)
            # As the actor, which generates before it trains.
            assert torch.equal(weights_of(averaged), weights_of(module))
        inputs, targets = rows(8, step)
        for each in (plain, engine):
            run_step(each, inputs.to(DTYPES[dtype]), targets, micro_batches=2)
        ema.update()
        expected = 0.75 * expected + 0.25 * masters_of(plain)
        with ema.average_weights():
            # fp32 rounding; weights of the norm are about 1.
            torch.testing.assert_close(masters_of(engine), expected, rtol=2**-23, atol=1e-7)
            # The first step of the schedule has a learning rate of 0.
            assert step == 0 or not torch.equal(weights_of(averaged), weights_of(module))
        assert torch.equal(weights_of(averaged), weights_of(module))
    assert torch.equal(masters_of(engine), masters_of(plain))


def test_a_state_of_another_zero_stage_is_rejected():
    _, engine, _ = layer("bf16", 2)
    state = engine.state_dict()
    # Stage 1 runs as stage 2 in bf16.
    layer("bf16", 1)[1].load_state_dict(state)
    with pytest.raises(InputError, match="the saved state has ZeRO stage 2, this run has stage 3"):
        layer("bf16", 3)[1].load_state_dict(state)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_trial_changes_nothing(stage, group):
    results = []
    for has_trial in (False, True):
        module = network()
        engine = engine_for(module, zero_stage=stage, lr_schedule="linear", warmup_steps=2)
        inputs, targets = rows(6)
        if has_trial:
            with engine.trial():
                run_step(engine, 1e3 * inputs, targets, micro_batches=2)
        for _ in range(3):
            run_step(engine, inputs, targets, micro_batches=2)
        results.append((weights_of(module), engine.learning_rate))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
