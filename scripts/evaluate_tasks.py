"""Evaluate a model on tasks of lm-evaluation-harness (lm_eval).

metrics.json contains the results of lm_eval without its times and machine information.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from snakechat.workflow.errors import InputError
from snakechat.workflow.external_files import planned_files
from snakechat.workflow.job import Job, run

# Names of dtypes in lm_eval.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Reproducible entries of the results of lm_eval.
RESULT_KEYS = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")


def main(job: Job[Any]) -> None:
    """Run lm_eval and keep its metrics.

    Raises:
        InputError: lm_eval is not installed, or fails, or a task file has changed.
    """
    program = shutil.which("lm_eval")
    if program is None:
        raise InputError(
            "lm_eval is not on PATH: build with --sdm conda, or"
            " pip install --no-deps --requirement requirements-lm-eval.txt"
        )
    output = job.result / "lm_eval"
    source = Path(job.placement["source"])
    # Task files, and the files that they refer to.
    with planned_files({source / task: digest for task, digest in job.spec["files"].items()}):
        process = subprocess.run([program, *arguments(job, output)])
    if process.returncode:
        raise InputError(f"lm_eval exited with status {process.returncode}: see its output above")
    [path] = output.rglob("results_*.json")
    results = json.loads(path.read_text())
    shutil.rmtree(output)
    metrics = {key: results[key] for key in RESULT_KEYS if key in results}
    (job.result / "metrics.json").write_text(json.dumps(metrics, indent=1, sort_keys=True) + "\n")
    job.facts["lm_eval"] = results["lm_eval_version"]


def arguments(job: Job[Any], output: Path) -> list[str]:
    """Return the arguments of lm_eval. output: the folder for its results."""
    settings, gpus = job.settings, job.placement["gpus_per_node"]
    limit = [] if settings.limit is None else ["--limit", str(settings.limit)]
    model = f"pretrained={job.inputs['model']},dtype={DTYPES[settings.dtype]}"
    if gpus > 1:
        # The layers are divided among the GPUs; those that do not fit are read from disk.
        model += f",parallelize=True,offload_folder={output / 'offload'}"
    return [
        *("--model", "hf"),
        *("--model_args", model),
        *("--tasks", ",".join(task_argument(job, task) for task in settings.tasks)),
        *("--device", "cuda" if gpus else "cpu"),
        *("--batch_size", "auto" if gpus else "1"),
        *("--seed", str(settings.seed)),
        *("--output_path", str(output)),
        *limit,
        *(["--apply_chat_template"] if settings.apply_chat_template else []),
    ]


def task_argument(job: Job[Any], task: str) -> str:
    """Return the name of a task of lm_eval, or the path of a task file of the workflow."""
    return str(Path(job.placement["source"], task)) if task in job.spec["files"] else task


if __name__ == "__main__":
    run(main)
