"""Fixtures that train by RLHF in this process."""

import json
import os
import shutil
from pathlib import Path

import pytest

import train_rlhf
from snakechat.config.rlhf import RlhfSettings
from snakechat.workflow.job import Job
from snakechat.workflow.manifest import read_input
from snakechat.workflow.placement import placement_of
from snakechat.workflow.run_options import RunOptions
from support.rlhf_inputs import SETTINGS, make_inputs

# No run of a few steps saves a checkpoint.
OPTIONS = RunOptions(save_steps=20)


@pytest.fixture(name="inputs", scope="module")
def rlhf_inputs(tokenizer, tmp_path_factory, group):
    """The inputs of a spec; jobs run in a temporary working directory."""
    folder = Path.cwd()
    work = tmp_path_factory.mktemp("rlhf")
    os.chdir(work)
    yield make_inputs(work, tokenizer)
    os.chdir(folder)


@pytest.fixture(name="train")
def rlhf_training(inputs):
    """A function that trains with changed settings and returns the job."""
    jobs = []

    def train(placement=(), options=OPTIONS, without=(), name="mine", **settings):
        spec_inputs = {key: entry for key, entry in inputs.items() if key not in without}
        spec = {"rule": "train_rlhf", "name": name, "path": f"output/rlhf/{name}"}
        spec |= {"settings": SETTINGS | settings, "inputs": spec_inputs}
        manifests = {key: read_input(entry) for key, entry in spec_inputs.items()}
        job = Job(spec, manifests, placement_of(dict(placement)), options, RlhfSettings)
        jobs.append(job)
        shutil.rmtree(job.result, ignore_errors=True)
        job.result.mkdir(parents=True)
        train_rlhf.main(job)
        job.metrics = lines_of(job.result / "metrics.jsonl")
        return job

    yield train
    for job in jobs:
        for folder in (job.result, job.states, job.log_folder):
            shutil.rmtree(folder, ignore_errors=True)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
