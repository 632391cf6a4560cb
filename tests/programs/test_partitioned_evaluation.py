"""Evaluations in several processes, which partition each model, and in one process are equal."""

import json

import numpy as np
import pytest
import yaml

from conftest import ROOT
from snakechat.data import toy
from snakechat.data.ragged_arrays import open_ragged, whole_lengths_path
from support import launching
from support.evaluation import evaluation_job  # noqa: F401
from support.evaluation_worker import run

pytestmark = pytest.mark.slow

PROCESSES = 2
# Fewer prompts than processes.
PROMPTS = {"one": ["Where can I get a pie?"]}
PAIRS = {"pairs": [{"prompt": "Hello", "chosen": "Good day!", "rejected": "No."}]}


@pytest.fixture
def jobs(job, tokenizer, tmp_path):
    """JSON values of jobs by program, without their results."""
    responses = [" Get a pie at the bakery.", " No.", " Hello Pia!", " You are welcome!", " Go!"]
    sequences = {
        "prompt": [tokenizer(text).input_ids for text in toy.all_prompts()[:5]],
        "chosen": [tokenizer(text, add_special_tokens=False).input_ids for text in responses],
    }
    sequences["rejected"] = sequences["chosen"][1:] + sequences["chosen"][:1]
    for split in ("train", "eval"):
        for name, ids in sequences.items():
            with open_ragged(job.inputs["tokens"], f"{split}.{name}", len(tokenizer)) as write_rows:
                write_rows(ids)
        lengths = [list(map(len, sequences[name])) for name in ("chosen", "rejected")]
        np.save(whole_lengths_path(job.inputs["tokens"], split), np.array(lengths, np.int32))
    for folder, sets in (("prompts", PROMPTS), ("prompts/pairs", PAIRS)):
        (tmp_path / folder).mkdir()
        for name, entries in sets.items():
            (tmp_path / folder / f"{name}.yaml").write_text(yaml.safe_dump(entries))
    inputs = {name: str(path) for name, path in job.inputs.items()}
    models = {"base": inputs["base"], "rlhf": inputs["rlhf"]}
    scorer = {"model": inputs["reward"], "tokens": inputs["tokens"]}
    pair_models = {"base": inputs["base"], "model": inputs["reward"]}
    chat = {"seed": 1, "dtype": "fp32", "template": "dialogue"}
    chat |= {"max_response_length": 12, "temperature": 1.0}
    functions = {"length_bounds": {"weight": 1, "arguments": {"min_characters": 12}}}
    return {
        "evaluate_sft": (
            {"dtype": "fp32", "datasets": ["toy"]},
            {"base": inputs["base"], "model": inputs["sft"], "tokens": inputs["tokens"]},
        ),
        "evaluate_reward": ({"datasets": ["toy"]}, scorer),
        "evaluate_rlhf": ({**vars(job.settings), "reward_functions": functions}, inputs),
        "compute_reference": (
            {"dtype": "fp32", "mismatched_max_length": 64, "batches": None},
            {"model": inputs["sft"], "tokens": inputs["tokens"]},
        ),
        "prompt_eval": ({**chat, "prompt_sets": ["one"]}, models),
        "rw_eval": ({**chat, "prompt_sets": ["pairs"]}, pair_models),
    }


def described(jobs, folder, **placement):
    """JSON values of the jobs with results in a folder."""
    described = {}
    rewards = {key: {"rule": "train_reward"} for key in ("reward", "judge")}
    for program, (settings, inputs) in jobs.items():
        result = folder / program
        result.mkdir(parents=True)
        described[program] = {
            "settings": settings,
            "inputs": inputs,
            "placement": {"micro_batch_tokens": 300, **placement},
            "source": str(folder.parent),
            "spec": {"inputs": rewards},
            "result": str(result),
        }
    return described


def test_processes_that_share_the_models_evaluate_as_one(jobs, tokenizer, tmp_path):
    for program, job in described(jobs, tmp_path / "alone").items():
        run(program, job)
    several = described(jobs, tmp_path / "several", nodes=PROCESSES, zero_stage=3)
    (tmp_path / "jobs.json").write_text(json.dumps(several))
    worker = ROOT / "tests/support/evaluation_worker.py"
    code, output = launching.run(PROCESSES, worker, tmp_path / "jobs.json", folder=ROOT)
    assert code == 0, output[-5000:]
    # Printed by one process.
    assert output.count("perplexity") == 1
    for program in jobs:
        assert_equal_results(tmp_path / "alone" / program, tmp_path / "several" / program)


def assert_equal_results(alone, several):
    """Assert equal files, but for the rounding of numbers."""
    names = [sorted(path.name for path in folder.iterdir()) for folder in (alone, several)]
    assert names[0] == names[1] and names[0]
    for path in alone.iterdir():
        other = several / path.name
        if path.suffix == ".npy":
            np.testing.assert_allclose(np.load(other), np.load(path), rtol=1e-5)
        elif path.suffix.startswith(".json"):
            (numbers, others), (expected, same) = map(fractions_and_others, (other, path))
            assert others == same
            assert numbers == pytest.approx(expected, rel=1e-5, abs=1e-5)


def fractions_and_others(path):
    """The numbers with a fraction in a file of JSON, and all other values."""
    numbers, text = [], path.read_text()
    values = [
        json.loads(value, parse_float=lambda number: numbers.append(float(number)))
        for value in (text.splitlines() if path.suffix == ".jsonl" else [text])
    ]
    return numbers, values
