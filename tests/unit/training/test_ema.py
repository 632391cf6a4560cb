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


def make(zero_stage, dtype, shift=0.0):
    """Return an engine whose first layer is frozen, and its average with a decay of 3/4."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    module[0].requires_grad_(False)
    with torch.no_grad():
        module[2].weight += shift
    module.to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    engine = engine_for(module, zero_stage=zero_stage, dtype=dtype)
    return engine, Ema(engine, 0.75)


def run_step(engine, seed):
    inputs, targets = rows(6, seed)
    inputs = inputs.to(next(engine.module.parameters()).dtype)
    engines.run_step(engine, inputs, targets, micro_batches=1)


def weights_of(engine):
    return engines.weights_of(engine.module)


def masters_of(engine):
    return torch.cat([master.detach().flatten() for master in engine.master_weights])


@pytest.mark.parametrize(("zero_stage", "dtype"), [(0, "fp32"), (2, "bf16"), (3, "bf16")])
def test_averages_in_fp32_resume_and_leave_the_training_as_it_is(zero_stage, dtype):
    plain, _ = make(zero_stage, dtype)
    engine, ema = make(zero_stage, dtype)
    expected = masters_of(plain)
    for seed in range(5):
        if seed == 3:
            # Shifted weights, so that none is correct by chance.
            resumed, again = make(zero_stage, dtype, shift=0.5)
            resumed.load_state_dict(copy.deepcopy(engine.state_dict()))
            again.load_state_dict(copy.deepcopy(ema.state_dict()))
            engine, ema = resumed, again
        run_step(plain, seed)
        run_step(engine, seed)
        ema.update()
        expected = 0.75 * expected + 0.25 * masters_of(plain)
        with ema.average_weights():
            # Closer than bf16 is.
            torch.testing.assert_close(masters_of(engine), expected, rtol=0, atol=1e-7)
            assert not torch.equal(weights_of(engine), weights_of(plain))
        assert torch.equal(weights_of(engine), weights_of(plain))
    assert torch.equal(masters_of(engine), masters_of(plain))
