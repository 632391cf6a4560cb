"""Training on GPUs: ZeRO stages and dtypes, resuming, sampling, compared with a CPU.

scripts/launch.py runs this file in several processes:

    test_training.py DEVICE FOLDER

A case is a training of workloads.TINY_CASES with a ZeRO stage, a dtype and options, as in
"sft 3 bf16 interrupted". Its result is FOLDER/CASE/result.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from gpu import workloads  # noqa: E402
from snakechat.workflow import processes  # noqa: E402

pytestmark = pytest.mark.slow

STEPS = 4
STAGES = [f"{stage} {dtype}" for dtype in ("fp32", "bf16") for stage in range(4)]
WHOLE = {"cpu": ["sft 0 fp32"]}
WHOLE["cuda"] = [f"sft {case}" for case in (*STAGES, "2 fp16", "3 fp16", "3 fp16 deterministic")]
SAMPLING = {"cpu": ["grpo 0 fp32"], "cuda": ["grpo 0 fp32", "grpo 3 fp32"]}
FURTHER = {"cpu": [], "cuda": ["sft 2 fp32 compiled"]}


def cases(device):
    """Return the names of all cases of a device."""
    interrupted = [f"{name} interrupted" for name in WHOLE[device]]
    return [*SAMPLING[device], *FURTHER[device], *WHOLE[device], *interrupted]


def make_job(name, device, number, folder):
    """Return the job of a case in a number of processes."""
    case, stage, dtype, *options = name.split()
    processes = {"gpus_per_node": number} if device == "cuda" else {"nodes": number}
    placement = {"gpus_per_node": 0, **processes, "zero_stage": int(stage)}
    placement |= {"compile": True} if "compiled" in options else {}
    return workloads.tiny_job(case, folder, folder / name / "result", dtype, **placement)


def main(device, folder):
    # Libraries of a GPU read it once.
    os.environ.update(processes.ENVIRONMENT)
    with mock.patch.object(workloads, "leave_process_group"):
        for name in cases(device):
            job = make_job(name, device, processes.world_size(), folder)
            is_exact = "deterministic" in name
            with mock.patch.object(
                processes, "uses_deterministic_kernels", lambda is_exact=is_exact: is_exact
            ):
                if "interrupted" in name:
                    job.options = replace(job.options, save_steps=1)
                    # The last step has no state.
                    workloads.train(job, STEPS - 1)
                workloads.train(job, STEPS)


# Of losses about 5.8, relative to a CPU in fp32.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}


def run(device, number, folder):
    """Return the metrics of the steps of each case."""
    # Not in the processes of a training: conftest.py switches garbage collection off.
    from support import launching

    # Processes would make the inputs at the same time.
    jobs = {name: make_job(name, device, number, folder) for name in cases(device)}
    code, output = launching.run(number, __file__, device, folder, device=device, timeout=900)
    assert code == 0, output[-5000:]
    return {name: workloads.metrics(job) for name, job in jobs.items()}


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
    assert len(expected) == STEPS and expected[-1] < expected[0]
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


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
