"""Train a few steps of a recipe at each ZeRO stage, with its own training program.

Each run has a spec with the code and settings of the training. The result contains the steps of all
runs, and zero.md: a table of their losses, times and memory, which differ between two builds.
"""

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from snakechat.reporting.formatting import format_cell
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job, run
from snakechat.workflow.manifest import RUN_RECORD
from snakechat.workflow.placement import Placement, ZeroStage, placement_values
from snakechat.workflow.run_options import RunOptions
from snakechat.workflow.value_types import changed_values

STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)
# Without evaluation during training.
UNEVALUATED = {"eval_steps": 0, "save_strategy": "last", "early_stopping_patience": 0}
# The command that runs a program in the processes of its placement.
LAUNCH = ["python", str(Path(__file__).with_name("launch.py"))]
# Ends of the last log line of a run without enough memory, from the program or the launcher.
OUT_OF_MEMORY = ("out of memory", "was ended by SIGKILL")
# The loss that is compared: the first of these that the steps have. In RLHF it is the critic's,
# because the actor's is close to 0 by construction.
LOSSES = ("loss", "value/loss", "policy/loss")
HEAD = (
    "ZeRO stage",
    "loss of the first step",
    "loss of the last step",
    "largest difference of losses",
    "seconds per step (median)",
    "peak memory of the first process (MB)",
    "peak memory of its GPU (MB)",
)


def main(job: Job[Any]) -> None:
    """Train at each stage and keep the steps.

    Raises:
        InputError: No stage has enough memory, or a run fails for another reason.
    """
    planned, scratch = job.settings.training, job.result / "scratch"
    scratch.mkdir()
    steps = job.settings.steps
    spec = planned | {"settings": planned["settings"] | UNEVALUATED | {"max_steps": steps}}
    runs = job.record["stages"] = {}
    for stage in STAGES:
        spec["name"], folder = f"{planned['name']}@zero-{stage}", scratch / f"stage-{stage}"
        spec["path"] = str(folder)
        # A run without checkpoints, in a store of its own.
        options = RunOptions(store=str(scratch / "store"), save_steps=steps + 1)
        runs[stage] = train(spec, placement_at_stage(job.placement, stage), options, LAUNCH)
        if "failed" not in runs[stage]:
            shutil.copy(folder / "metrics.jsonl", job.result / f"stage-{stage}.jsonl")
        shutil.rmtree(scratch / "store", ignore_errors=True)
        print(f"ZeRO {stage}: {runs[stage].get('failed') or runs[stage]['seconds_per_step']}")
    if all("failed" in record for record in runs.values()):
        raise InputError(f"{planned['path']}: out of memory at every ZeRO stage")
    shutil.rmtree(scratch)
    rows = [HEAD, ["---"] * len(HEAD), *table_rows(job.result, runs)]
    lines = [f"| {' | '.join(map(format_cell, row))} |\n" for row in rows]
    (job.result / "zero.md").write_text("".join(lines))


def table_rows(result: Path, runs: Mapping[int, Mapping[str, Any]]) -> Iterator[list[Any]]:
    """Yield the row of each stage below HEAD.

    Losses are compared with the losses of the lowest stage that had enough memory.
    """
    base: list[float] = []
    for stage, record in runs.items():
        if "failed" in record:
            yield [str(stage), record["failed"], *[None] * (len(HEAD) - 2)]
            continue
        losses = read_losses(result / f"stage-{stage}.jsonl")
        base = base or losses
        yield [
            str(stage),
            losses[0],
            losses[-1],
            max(abs(loss - other) for loss, other in zip(losses, base, strict=True)),
            record["seconds_per_step"],
            record["peak_memory_mb"],
            record.get("peak_gpu_memory_mb"),
        ]


def read_losses(path: Path) -> list[float]:
    """Read the loss of each step, without the evaluation before the first one."""
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [step for step in steps if step["step"]]
    key = next(key for key in LOSSES if key in steps[0])
    return [step[key] for step in steps]


def placement_at_stage(placement: Placement, stage: ZeroStage) -> Placement:
    """Return a placement at a ZeRO stage, with as much of its offload as the stage supports."""
    offload = placement.offload
    if offload != "none" and stage < 3:
        offload = "optimizer" if stage else "none"
    # The critic uses the stage of the actor.
    return replace(placement, zero_stage=stage, critic_zero_stage=None, offload=offload)


def train(
    spec: Mapping[str, Any], placement: Placement, options: RunOptions, launch: list[str]
) -> dict[str, Any]:
    """Run a training program.

    Args:
        spec: Spec of the training.
        placement: Placement of the training.
        options: Options of its run.
        launch: Command that runs a program, as words.

    Returns:
        Its run.json, or {"failed": "out of memory"}.

    Raises:
        InputError: The program fails for another reason.
    """
    path = Path(f"{spec['path']}.spec.json")
    path.write_text(json.dumps(spec))
    program = str(Path(__file__).with_name(f"{spec['rule']}.py"))
    command = [*launch, program, "--spec", str(path)]
    command += ["--placement", json.dumps(placement_values(placement))]
    command += ["--options", json.dumps(changed_values(options))]
    log = path.with_suffix(".log")
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
    if code == 0:
        return json.loads(Path(spec["path"], RUN_RECORD).read_text())
    last_line = log.read_text().strip().rpartition("\n")[2]
    # The system kills a single process without a message.
    killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    if killed or any(end in last_line for end in OUT_OF_MEMORY):
        return {"failed": "out of memory"}
    raise InputError(f"{spec['name']}: {last_line.removeprefix('error: ')}")


if __name__ == "__main__":
    run(main)
