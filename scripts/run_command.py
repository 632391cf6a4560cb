"""Train by the command of a recipe in place of our trainer. It fills the folder of the result."""

from typing import Any

from snakechat.workflow.commands import run_command
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job, run


def main(job: Job[Any]) -> None:
    """Run the command, and check what it wrote.

    Raises InputError as run_command, or if the model is not what the stage trains.
    """
    run_command(job, job.result)
    # It imports torch, which the command has no use for.
    from snakechat.modeling.command_outputs import check_output, write_metrics

    try:
        source = job.inputs.get("actor") or job.inputs["model"]
        check_output(job.result, source, job.spec["rule"] == "train_reward")
        write_metrics(job.result / "metrics.jsonl", job.log_folder)
    except InputError as error:
        raise InputError(f"{job.target}: {error}") from None


if __name__ == "__main__":
    run(main)
