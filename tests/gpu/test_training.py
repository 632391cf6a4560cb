"""Training on GPUs: ZeRO stages and dtypes, resuming, generation, compared with a CPU."""

import json

import pytest
import torch

from conftest import ROOT
from support import launching

pytestmark = pytest.mark.slow

# Of losses about 4.6, relative to a CPU in fp32.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}


def run(device, number, folder):
    """Return what each process of the worker returned."""
    worker = ROOT / "tests/gpu/worker.py"
    code, output = launching.run(number, worker, device, folder, device=device, timeout=900)
    assert code == 0, output[-5000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(number)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The run of a CPU in fp32 without ZeRO."""
    [results] = run("cpu", 1, tmp_path_factory.mktemp("cpu"))
    return results


# None: all GPUs.
DEVICES = [
    ("cpu", 1),
    pytest.param(("cuda", 1), marks=pytest.mark.gpu),
    pytest.param(("cuda", None), marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module", params=DEVICES, ids=str)
def runs(request, reference, tmp_path_factory):
    """The runs of a device in a number of processes."""
    device, number = request.param
    if (device, number) == ("cpu", 1):
        return [reference]
    if torch.cuda.device_count() < (number or 2):
        needed = "a GPU" if number else "several GPUs"
        pytest.skip(f"needs {needed}: torch finds {torch.cuda.device_count()}")
    return run(device, number or torch.cuda.device_count(), tmp_path_factory.mktemp("gpus"))


def test_losses_equal_those_of_a_cpu_without_zero(runs, reference):
    expected = reference["0 fp32"][0]["losses"]
    assert expected[-1] < expected[0]
    for rank in runs:
        for case, (whole, _) in rank.items():
            tolerance = TOLERANCES[case.split()[1]]
            assert whole["losses"] == pytest.approx(expected, rel=tolerance), case


def test_an_interrupted_run_goes_on_with_the_same_losses(runs):
    for rank in runs:
        for case, (whole, interrupted) in rank.items():
            # On a GPU, atomic additions may round differently, unless kernels are deterministic.
            tolerance = 0 if case.endswith("deterministic") else 1e-5
            assert interrupted["losses"] == pytest.approx(whole["losses"], rel=tolerance), case


def test_greedy_responses_of_the_trained_model_equal_those_of_a_cpu(runs, reference):
    expected = reference["0 fp32"][0]["responses"]
    for rank in runs:
        for case, (whole, _) in rank.items():
            if case.endswith("fp32"):
                assert whole["responses"] == expected, case
