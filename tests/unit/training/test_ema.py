"""The moving average of an engine's weights, compared with a plain loop, on the CPU."""

import copy

import pytest
import torch
from torch import nn

from snakechat.training.ema import Ema
from support import engines
from support.engines import engine_for, rows

# DeepSpeed calls functions of torch that are deprecated.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.usefixtures("group"),
]

STAGES = [(0, "fp32"), (2, "bf16"), (3, "bf16")]


def make(zero_stage, dtype, rate=0.01, shift=0.0):
    """Return an engine whose first layer is frozen, and its average with a decay of 3/4."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    module[0].requires_grad_(False)
    with torch.no_grad():
        module[2].weight += shift
    module.to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    engine = engine_for(module, zero_stage=zero_stage, rate=rate, dtype=dtype)
    return engine, Ema(engine, 0.75)


def run_step(engine, seed):
    inputs, targets = rows(6, seed)
    inputs = inputs.to(next(engine.module.parameters()).dtype)
    engines.run_step(engine, inputs, targets, micro_batches=1)


def weights_of(engine):
    return engines.weights_of(engine.module)


def masters_of(engine):
    return torch.cat([master.detach().flatten() for master in engine.master_weights])


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_averages_of_bf16_weights_are_in_fp32(zero_stage):
    # Steps of 1e-5, below the resolution of bf16, change the averages.
    engine, ema = make(zero_stage, "bf16", rate=1e-5)
    expected = masters_of(engine)
    for seed in range(4):
        run_step(engine, seed)
        ema.update()
        expected = 0.75 * expected + 0.25 * masters_of(engine)
    averages = torch.cat([average.flatten() for average in ema.averages])
    torch.testing.assert_close(averages, expected, rtol=0, atol=1e-7)
    assert 1e-6 < (averages - masters_of(engine)).abs().max() < 1e-4
    with ema.average_weights():
        assert weights_of(engine).dtype == torch.bfloat16


@pytest.mark.parametrize(("zero_stage", "dtype"), STAGES)
def test_training_is_unchanged_by_a_swap_of_weights_and_averages(zero_stage, dtype):
    plain, _ = make(zero_stage, dtype)
    engine, ema = make(zero_stage, dtype)
    for seed in range(6):
        run_step(plain, seed)
        run_step(engine, seed)
        ema.update()
        with ema.average_weights():
            assert not torch.equal(weights_of(engine), weights_of(plain))
        assert torch.equal(weights_of(engine), weights_of(plain))
    assert torch.equal(masters_of(engine), masters_of(plain))


@pytest.mark.parametrize(("zero_stage", "dtype"), STAGES)
def test_averages_resume_from_their_state(zero_stage, dtype):
    engine, ema = make(zero_stage, dtype)
    for seed in range(3):
        run_step(engine, seed)
        ema.update()
    # Shifted weights, so that none is correct by chance.
    resumed, again = make(zero_stage, dtype, shift=0.5)
    resumed.load_state_dict(copy.deepcopy(engine.state_dict()))
    again.load_state_dict(copy.deepcopy(ema.state_dict()))
    for seed in (3, 4):
        for one, average in ((engine, ema), (resumed, again)):
            run_step(one, seed)
            average.update()
    assert all(map(torch.equal, again.averages, ema.averages))
    with ema.average_weights(), again.average_weights():
        assert torch.equal(weights_of(resumed), weights_of(engine))
