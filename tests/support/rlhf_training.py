"""Fixtures that train by RLHF in this process, on small models with random weights."""

import json
import shutil

import pytest
import torch

import train_rlhf
from conftest import INIT
from snakechat.config.rlhf import RlhfSettings
from snakechat.modeling.loading import load_scorer
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from snakechat.workflow.job import Job, read_manifests
from snakechat.workflow.processes import Placement, RunOptions
from support.configs import load
from support.stages import stages_of_small_model, toy_rows, write_manifest

# No run of a few steps saves a checkpoint.
OPTIONS = RunOptions(save_steps=20)
NUM_PROMPTS, NUM_PROBES = 240, 16
# The tiny recipe with two steps of two updates each.
CONFIG = load()
# With those that have no effect on recipe tiny, but on the recipes that tests make of it.
SETTINGS = {
    key: value
    for key, value in CONFIG.recipe("rlhf", "tiny").items()
    if key in RlhfSettings.model_fields
} | CONFIG.program_settings("rlhf", "tiny")
SETTINGS |= {"max_response_length": 8, "epochs": 1, "ppo_epochs": 1, "log_responses_steps": 2}
SETTINGS |= {"rollout_batch_size": 120, "global_batch_size": 60}
RECIPES = {"sft": {"tiny": {"model": "random"}}, "rlhf": {"tiny": {"actor": "models/random"}}}


@pytest.fixture(name="inputs", scope="module")
def rlhf_inputs(tokenizer, tmp_path_factory, group):
    """The inputs of a spec; jobs run in a temporary working directory."""
    folder = tmp_path_factory.mktemp("rlhf")
    pairs = toy_rows(NUM_PROMPTS + NUM_PROBES)["train"]
    rows = {"train": pairs[:NUM_PROMPTS], "eval": pairs[NUM_PROMPTS:]}
    with stages_of_small_model(folder, tokenizer, rows, RECIPES) as stages:
        actor = stages.models["random"]
        teacher = make_causal({**INIT, "max_position_embeddings": 96}, tokenizer, 2)
        torch.manual_seed(3)
        scorer = load_scorer(actor, "fp32", tokenizer, new_head=True)
        for name, model in (("teacher", teacher), ("reward", scorer)):
            save_model(model, tokenizer, folder / name)
            write_manifest(folder / name)
        yield {
            "actor": {"rule": "fetch_model", "path": str(actor)},
            "teacher": {"rule": "fetch_model", "path": str(folder / "teacher")},
            "reward": {"rule": "train_reward", "path": str(folder / "reward")},
            "tokens": {
                "rule": "tokenize_rlhf",
                "path": str(stages.result("tokenize_rlhf", "tiny")),
            },
            "ptx": {"rule": "tokenize_sft", "path": str(stages.result("tokenize_sft", "tiny"))},
        }


@pytest.fixture(name="train")
def rlhf_training(inputs):
    """A function that trains with changed settings and returns the job."""
    jobs = []

    def train(placement=(), options=OPTIONS, without=(), name="mine", **settings):
        without = {*without, *(() if "ptx_coef" in settings else ("ptx",))}
        spec_inputs = {key: entry for key, entry in inputs.items() if key not in without}
        spec = {"rule": "train_rlhf", "name": name, "path": f"output/rlhf/{name}"}
        spec |= {"settings": SETTINGS | settings, "inputs": spec_inputs}
        manifests = read_manifests(spec)
        job = Job(spec, manifests, Placement(**dict(placement)), options, RlhfSettings)
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
