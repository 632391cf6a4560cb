"""The trainings of tests/gpu/test_training.py, which scripts/launch.py runs in several processes.

    worker.py DEVICE FOLDER

A case is a training of workloads.TINY_CASES with a ZeRO stage, a dtype and options, as in
"sft 3 bf16 interrupted". Its result is FOLDER/CASE/result.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from gpu import workloads  # noqa: E402
from snakechat.workflow import processes  # noqa: E402

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


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
