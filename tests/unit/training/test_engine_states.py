"""States of the engines: a resumed run equals an uninterrupted one."""

from types import SimpleNamespace

import pytest
import torch

from snakechat.training.checkpointing import Checkpointer
from snakechat.workflow.errors import InputError
from snakechat.workflow.run_options import RunOptions
from support.engines import RATE, cosine, engine_for, network, rows, run_step, weights_of

# After snakechat, which sets DS_ACCELERATOR.
import deepspeed  # isort: skip

# DeepSpeed calls functions of torch that are deprecated.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.usefixtures("group"),
]


def stateful(zero_stage, dtype, shift=0.0, frozen=False):
    """Return a module and its engine, whose learning rate changes.

    shift: added to the trained weights.
    """
    module = network().to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    for name, weight in module.named_parameters():
        # As with LoRA, frozen weights are not part of a state.
        weight.requires_grad_(not (frozen and name.startswith(("0.", "2."))))
        if weight.requires_grad:
            weight.data.add_(shift)
    schedule = {"lr_schedule": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.1}
    return module, engine_for(module, 6, zero_stage, dtype=dtype, **schedule)


def train(engine, job, number=6, dtype="fp32"):
    """Run the remaining steps and return the rate of each; saves a checkpoint after the third."""
    rates = []
    steps = [rows(8, seed) for seed in range(number)]
    for _, (inputs, targets) in Checkpointer(job, module=engine).steps(steps):
        rates.append(engine.learning_rate)
        kind = torch.bfloat16 if dtype == "bf16" else torch.float32
        run_step(engine, inputs.to(kind), targets, micro_batches=2)
    return rates


@pytest.fixture
def make_job(tmp_path):
    """A function that returns a job with a checkpoint every three steps."""

    def job(name):
        result = tmp_path / name / "result"
        result.mkdir(parents=True, exist_ok=True)
        (result / "metrics.jsonl").touch()
        states = tmp_path / name / "states"
        options = RunOptions(save_steps=3)
        return SimpleNamespace(result=result, states=states, options=options, record={})

    return job


STAGES = [(0, "bf16"), (2, "bf16"), (3, "bf16")]


@pytest.mark.parametrize(
    ("zero_stage", "dtype", "frozen"),
    [
        *[(0, "fp32", False), (1, "fp32", True), (2, "fp32", False), (3, "fp32", True)],
        *[(0, "bf16", True), (1, "bf16", False), (2, "bf16", True), (3, "bf16", False)],
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(zero_stage, dtype, frozen, make_job):
    module, engine = stateful(zero_stage, dtype, frozen=frozen)
    rates = train(engine, make_job("whole"), dtype=dtype)
    assert rates == pytest.approx(
        [RATE * factor for factor in (0, 0.5, *(cosine(step / 4, 0.1) for step in range(4)))]
    )

    _, stopped = stateful(zero_stage, dtype, frozen=frozen)
    assert train(stopped, make_job("stopped"), number=3, dtype=dtype) == rates[:3]
    # Shifted weights, so that none is correct by chance.
    again, resumed = stateful(zero_stage, dtype, shift=0.5, frozen=frozen)
    assert train(resumed, make_job("stopped"), dtype=dtype) == rates[3:]

    assert torch.equal(weights_of(again), weights_of(module))
    expected, restored = engine.state_dict(), resumed.state_dict()
    assert restored.keys() == expected.keys()
    for name, value in expected.items():
        equal = torch.equal if torch.is_tensor(value) else lambda one, other: one == other
        assert equal(restored[name], value), name


@pytest.mark.parametrize(("zero_stage", "dtype"), STAGES)
def test_a_restored_module_has_its_weights_before_the_first_step(zero_stage, dtype, make_job):
    # As the actor, which generates before it trains.
    module, engine = stateful(zero_stage, dtype)
    train(engine, make_job("job"), number=3, dtype=dtype)
    again, resumed = stateful(zero_stage, dtype, shift=0.5)
    assert not torch.equal(weights_of(again), weights_of(module))
    Checkpointer(make_job("job"), module=resumed)
    assert torch.equal(weights_of(again), weights_of(module))
    inputs = rows(4, 9)[0].to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    with torch.no_grad():
        assert torch.equal(again(inputs), module(inputs))


@pytest.mark.parametrize(("zero_stage", "dtype"), STAGES)
def test_a_state_has_fp32_weights_and_moments_of_trained_weights_only(zero_stage, dtype, make_job):
    module, engine = stateful(zero_stage, dtype, frozen=True)
    train(engine, make_job("job"), number=3, dtype=dtype)
    tensors = {name: value for name, value in engine.state_dict().items() if torch.is_tensor(value)}
    assert all(value.dtype == torch.float32 for value in tensors.values())
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        trained = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
        everything = sum(weight.numel() for weight in module.parameters())
    for name in ("weights", "exp_avg", "exp_avg_sq"):
        size = sum(value.numel() for key, value in tensors.items() if key.endswith(f".{name}"))
        # Groups are padded with zeros.
        assert trained <= size <= trained + 4 < everything


def test_a_state_of_another_zero_stage_is_rejected():
    _, engine = stateful(2, "fp32")
    _, other = stateful(3, "fp32")
    with pytest.raises(InputError) as error:
        other.load_state_dict(engine.state_dict())
    assert str(error.value) == (
        "the saved state has ZeRO stage 2, this run has stage 3: set zero_stage: 2, or delete the"
        " state in output/state"
    )


def test_stage_1_in_bf16_resumes_as_stage_2(make_job):
    module, engine = stateful(2, "bf16")
    train(engine, make_job("job"), number=3, dtype="bf16")
    again, resumed = stateful(1, "bf16", shift=0.5)
    resumed.load_state_dict(engine.state_dict())
    assert torch.equal(weights_of(again), weights_of(module))
