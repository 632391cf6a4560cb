"""Trainings whose responses vLLM itself samples, on a GPU if there is one.

They need an environment with vLLM: make test-vllm. The other tests have a stub in its place
(tests/unit/modeling/test_vllm_sampler.py).
"""

import json
import sys
from statistics import mean

import pytest
import torch
import yaml

from conftest import INIT, ROOT, Workflow, copy_sources
from snakechat.data.ragged_arrays import Ragged
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from support.configs import project_values
from support.launching import launch

pytestmark = pytest.mark.vllm

WORKER = ROOT / "tests/support/vllm_worker.py"
GPUS = int(torch.cuda.is_available())
OURS = project_values()
PLACEMENT = {"placement": {"deployment": "cpu", "gpus_per_node": GPUS}}
SHORT = {"judge": None, "epochs": 1, **PLACEMENT}
PPO = OURS["rlhf"]["recipes"]["tiny"] | SHORT
GRPO = OURS["rlhf"]["recipes"]["tiny-grpo"] | SHORT
GRPO |= {"datasets": [{"toy": 0.35}], "lora_rank": 8}
VLLM = {"generation_backend": "vllm"}
GENERATIONS = OURS["generations"]["recipes"]["tiny"] | VLLM | PLACEMENT
GENERATIONS |= {"datasets": [{"toy": 0.1}]}
RECIPES = {
    "ppo": PPO,
    "ppo-vllm": PPO | VLLM,
    "grpo": GRPO,
    "grpo-vllm": GRPO | VLLM,
}
CONFIG = {
    "deterministic": True,
    "deployments": {"cpu": {"threads": 1}},
    "rlhf": {"recipes": RECIPES},
    "generations": {"recipes": {"vllm": GENERATIONS}},
}


# Processes of the job, processes of an engine, and the rank of adapters. On a CPU, the processes of
# an engine share memory. A killed test leaves it as /dev/shm/*-cpushm_*, and the next test fails
# until it is deleted.
ENGINES = {"one": (1, 1, 0), "lora": (1, 1, 8), "two engines": (2, 1, 0), "divided": (2, 2, 8)}


@pytest.mark.parametrize("name", ENGINES)
def test_logprobs_are_those_of_training_after_each_update(name, tokenizer, tmp_path):
    processes, num_ranks, lora_rank = ENGINES[name]
    if GPUS and processes > torch.cuda.device_count():
        pytest.skip(f"needs {processes} GPUs")
    # The attention of vLLM for CPUs needs heads of at least 32 dimensions.
    model = make_causal({**INIT, "hidden_size": 64, "word_embed_proj_dim": 64}, tokenizer, 1)
    save_model(model, tokenizer, tmp_path / "model")
    device = "cuda" if GPUS else "cpu"
    process = launch(processes, WORKER, tmp_path, num_ranks, lora_rank, device=device)
    output = process.communicate()[0]
    assert process.returncode == 0 and "destroy_process_group" not in output, output[-5000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(processes)]
    for updates in ranks:
        differences, responses = zip(*updates, strict=True)
        assert max(differences) < (0.02 if GPUS else 1e-4)
        # Other weights, other responses.
        assert len(set(map(str, responses))) == len(responses)
    # The processes of an engine have the same responses.
    sampled = [[responses for _, responses in updates] for updates in ranks]
    assert all((each == sampled[0]) == (num_ranks == 2) for each in sampled[1:])


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A workflow with all recipes."""
    folder = tmp_path_factory.mktemp("vllm") / "tree"
    copy_sources(folder)
    (folder / "vllm.yaml").write_text(yaml.safe_dump(CONFIG))
    tree = Workflow(folder, "--configfile", "config.yaml", "vllm.yaml")
    # vLLM starts Python itself.
    tree.python = sys.executable
    tree.build(*(f"output/rlhf/{name}.manifest.json" for name in sorted(RECIPES)))
    return tree


def metrics_of(tree, name):
    lines = (tree.folder / f"output/rlhf/{name}/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_training_learns_as_with_our_own_sampler(algorithm, tree):
    own, vllm = (metrics_of(tree, name) for name in (algorithm, f"{algorithm}-vllm"))
    assert len(own) == len(vllm)
    for line in vllm:
        assert line["policy/sampler_difference"] < (0.02 if GPUS else 1e-5)
        assert line["policy/first_ratio"] == pytest.approx(1, abs=1e-4)
    own_scores, scores = ([line["objective/scores"] for line in run] for run in (own, vllm))
    assert mean(scores[-5:]) > mean(scores[:5]) + 1
    assert mean(scores[-5:]) == pytest.approx(mean(own_scores[-5:]), abs=1)


def test_vllm_generates_the_responses_to_a_dataset(tree):
    tree.build("output/generations/vllm.manifest.json")
    responses = Ragged(tree.folder / "output/generations/vllm", "train.responses")
    prompts = Ragged(tree.folder / "output/tokens/generations/vllm", "train.prompt")
    assert len(responses) == GENERATIONS["num_generations"] * len(prompts) > 0
