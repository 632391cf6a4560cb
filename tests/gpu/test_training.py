"""Training on GPUs: ZeRO stages and dtypes, resuming, sampling, compared with a CPU."""

import pytest
import torch

from conftest import ROOT
from gpu import worker
from gpu.workloads import metrics
from support import launching

pytestmark = pytest.mark.slow

# Of losses about 5.8, relative to a CPU in fp32.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}


def run(device, number, folder):
    """Return the metrics of the steps of each case."""
    # Processes would make the inputs at the same time.
    jobs = {name: worker.make_job(name, device, number, folder) for name in worker.cases(device)}
    program = ROOT / "tests/gpu/worker.py"
    code, output = launching.run(number, program, device, folder, device=device, timeout=900)
    assert code == 0, output[-5000:]
    return {name: metrics(job) for name, job in jobs.items()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The trainings of a CPU in fp32 without ZeRO."""
    return run("cpu", 1, tmp_path_factory.mktemp("cpu"))


# None: all GPUs.
DEVICES = [
    ("cpu", 1),
    pytest.param(("cuda", 1), marks=pytest.mark.gpu),
    pytest.param(("cuda", None), marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module", params=DEVICES, ids=str)
def runs(request, reference, tmp_path_factory):
    """The trainings of a device in a number of processes."""
    device, number = request.param
    if (device, number) == ("cpu", 1):
        return reference
    if torch.cuda.device_count() < (number or 2):
        needed = "a GPU" if number else "several GPUs"
        pytest.skip(f"needs {needed}: torch finds {torch.cuda.device_count()}")
    return run(device, number or torch.cuda.device_count(), tmp_path_factory.mktemp("gpus"))


def values(steps, *names):
    return [step[name] for step in steps if step["step"] for name in names]


def test_losses_equal_those_of_a_cpu_without_zero(runs, reference):
    expected = values(reference["sft 0 fp32"], "loss")
    assert len(expected) == worker.STEPS and expected[-1] < expected[0]
    for name, steps in runs.items():
        if name.startswith("sft"):
            tolerance = TOLERANCES[name.split()[2]]
            assert values(steps, "loss") == pytest.approx(expected, rel=tolerance), name


def test_an_interrupted_run_goes_on_with_the_same_losses(runs):
    for name, steps in runs.items():
        if name.endswith(" interrupted"):
            whole = values(runs[name.removesuffix(" interrupted")], "loss")
            # On a GPU, atomic additions may round differently, unless kernels are deterministic.
            tolerance = 0 if "deterministic" in name else 1e-5
            assert values(steps, "loss") == pytest.approx(whole, rel=tolerance), name


def test_responses_equal_those_of_a_cpu(runs, reference):
    names = "response/length", "objective/scores"
    expected = values(reference["grpo 0 fp32"], *names)
    for name, steps in runs.items():
        if name.startswith("grpo"):
            assert values(steps, *names) == pytest.approx(expected, rel=1e-3), name
