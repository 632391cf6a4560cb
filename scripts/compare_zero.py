"""Train a few steps of a recipe at each ZeRO stage, by its own training program.

Each stage has a spec like that of the training, of the same code and settings, over the first rows
of its data. The result has the figures of the steps; times and memory, which no two runs share, are
in NAME.run.json.
"""

import json
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np

from snakechat.data.tokens import Ragged
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import run
from snakechat.workflow.manifest import manifest_path, read_manifest, result_files

STAGES = range(4)
# Once over the rows, without an evaluation between steps.
SHORT = {"epochs": 1, "eval_steps": 0, "keep": "last", "patience": 0}
# What a run ends with where memory is too small: a line of ours, or of the launcher.
NO_MEMORY = ("out of memory", "was ended by SIGKILL")


def main(job):
    """Cut the data, train at each stage, keep the figures."""
    planned, scratch = job.settings.training, job.result / "scratch"
    settings = planned["settings"]
    inputs = cut_inputs(planned["inputs"], rows_of(settings, job.settings.steps), scratch)
    spec = planned | {
        "inputs": inputs,
        "settings": settings | {key: SHORT[key] for key in SHORT.keys() & settings},
    }
    runs = job.record["stages"] = {}
    for stage in STAGES:
        spec["name"], folder = f"{planned['name']}@zero-{stage}", scratch / f"stage-{stage}"
        spec["path"] = str(folder)
        # States would only take time.
        placement = placed(job.placement, stage) | {"save_steps": job.settings.steps + 1}
        runs[stage] = train(spec, placement, job.placement["launch"])
        if "failed" not in runs[stage]:
            shutil.copy(folder / "metrics.jsonl", job.result / f"stage-{stage}.jsonl")
        shutil.rmtree(folder, ignore_errors=True)
        print(f"ZeRO {stage}: {runs[stage].get('failed') or runs[stage]['seconds_per_step']}")
    if all("failed" in record for record in runs.values()):
        raise InputError(f"{planned['path']}: out of memory at each ZeRO stage")
    shutil.rmtree(scratch)


def rows_of(settings, steps):
    """Rows of each part of the data: as many as the steps take, and a step's to be judged by."""
    batch = settings.get("rollout_batch_size", settings["global_batch_size"])
    return {"train": steps * batch, "eval": batch}


def cut_inputs(inputs, rows, scratch):
    """The inputs of a training with the first rows of what is told by rows, in a folder of ours."""
    found = dict(inputs)
    for key, cut in (("tokens", cut_tokens), ("reference", cut_reference)):
        if key in inputs:
            source, target = Path(inputs[key]["path"]), scratch / key
            target.mkdir(parents=True)
            cut(source, target, rows)
            manifest = read_manifest(manifest_path(source)) | {"files": result_files(target)}
            manifest_path(target).write_text(json.dumps(manifest))
            found[key] = inputs[key] | {"path": str(target)}
    return found


def cut_tokens(source, target, rows):
    """The first rows of each ragged array of a folder."""
    for path in source.glob("*.offsets.npy"):
        name = path.name.removesuffix(".offsets.npy")
        part, _, _ = name.partition(".")
        Ragged(source, name).write_first(rows[part], target, name)


def cut_reference(source, target, rows):
    """The reference's log-probabilities [2, n] of the first rows."""
    for part, number in rows.items():
        np.save(target / f"{part}.npy", np.load(source / f"{part}.npy")[:, :number])


def placed(placement, stage):
    """A recipe's placement at a ZeRO stage, with as much of its offload as there is at that one."""
    # A critic goes with its actor.
    where = {k: value for k, value in placement.items() if k not in ("launch", "critic_zero_stage")}
    if where["offload"] != "none" and stage < 3:
        where["offload"] = "optimizer" if stage else "none"
    return where | {"zero_stage": stage}


def train(spec, placement, launch):
    """Run a training program; returns its run.json, or {"failed": ...} where memory is too small.

    Raises InputError where it fails for another reason.
    """
    path = Path(f"{spec['path']}.spec.json")
    path.write_text(json.dumps(spec))
    program = Path(__file__).with_name(f"{spec['rule']}.py")
    words = [program, "--spec", path, "--placement", json.dumps(placement)]
    command = f"{launch} {shlex.join(map(str, words))}"
    log = path.with_suffix(".log")
    with log.open("w") as file:
        code = subprocess.run(command, shell=True, stdout=file, stderr=subprocess.STDOUT).returncode
    if code == 0:
        return json.loads(Path(f"{spec['path']}.run.json").read_text())
    said = log.read_text().strip().rpartition("\n")[2]
    # By the system's own hand, a process alone says nothing.
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL) or any(end in said for end in NO_MEMORY):
        return {"failed": "out of memory"}
    raise InputError(f"{spec['name']}: {said.removeprefix('error: ')}")


if __name__ == "__main__":
    run(main)
