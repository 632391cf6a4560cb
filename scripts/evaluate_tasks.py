"""Run lm-evaluation-harness on a model.

It is a program of its own (lm_eval), which fetches its tasks from the hub. metrics.json has what it
found; what it tells of times and of the machine is left out.
"""

import json
import shutil
import subprocess
from pathlib import Path

from snakechat.workflow.errors import InputError
from snakechat.workflow.job import run
from snakechat.workflow.manifest import check_external_file

# As it calls them.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
KEPT = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")


def main(job):
    """Call it, and keep its figures. Raises InputError where it is not there, or fails."""
    program = shutil.which("lm_eval")
    if program is None:
        raise InputError(
            "lm_eval is not on PATH: build with --sdm conda, or pip install 'lm_eval[hf]' in the"
            " version of envs/lm-eval.yaml"
        )
    told = job.result / "told"
    ended = subprocess.run([program, *arguments(job, told)])
    if ended.returncode:
        raise InputError(f"lm_eval ended with status {ended.returncode}: see what it said above")
    [path] = told.rglob("results_*.json")
    found = json.loads(path.read_text())
    shutil.rmtree(told)
    figures = {key: found[key] for key in KEPT if key in found}
    (job.result / "metrics.json").write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    job.facts["lm_eval"] = found["lm_eval_version"]


def arguments(job, told):
    """What lm_eval is called with. told: the folder for what it tells."""
    settings, on_gpu = job.settings, job.placement["gpus_per_node"] > 0
    limit = [] if settings.limit is None else ["--limit", str(settings.limit)]
    return [
        *("--model", "hf"),
        *("--model_args", f"pretrained={job.inputs['model']},dtype={DTYPES[settings.dtype]}"),
        *("--tasks", ",".join(task_of(job, task) for task in settings.tasks)),
        *("--device", "cuda" if on_gpu else "cpu"),
        *("--batch_size", "auto" if on_gpu else "1"),
        *("--seed", str(settings.seed)),
        *("--output_path", str(told)),
        *limit,
    ]


def task_of(job, task):
    """A task by its name, or the path of the file that it is told in."""
    if task not in job.spec["files"]:
        return task
    path = Path(job.placement["source"], task)
    check_external_file(path, job.spec["files"][task])
    return str(path)


if __name__ == "__main__":
    run(main)
