"""The first steps of recipe gsm8k-qwen2.5-0.5b, with a tiny model and few rows of a local hub."""

import pytest
import yaml

from conftest import ROOT, Workflow, copy_sources
from support.families import CHECKPOINTS, save_checkpoint
from support.files import as_parquet
from support.hub import Hub, serving

RECIPE = "gsm8k-qwen2.5-0.5b"
CONFIG = yaml.safe_load((ROOT / "config.yaml").read_text())
MODEL = CONFIG["models"]["qwen2.5-0.5b-instruct"]
DATASET = CONFIG["datasets"]["gsm8k"]
SMALL = {
    "deployment": "cpu",
    "evaluation": {"num_prompts": 4, "num_generations": 1, "bootstrap_resamples": 100},
    "rlhf": {
        "recipes": {
            RECIPE: {
                "max_steps": 2,
                "rollout_batch_size": 4,
                "global_batch_size": 20,
                "max_prompt_length": 384,
                "max_response_length": 8,
            }
        }
    },
}


class PinnedHub(Hub):
    """A hub whose repositories are at the revisions of the config."""

    def commit(self, repository):
        return (DATASET if repository.startswith("dataset/") else MODEL)["revision"]


def problems(number):
    return [
        {
            "question": f"Ann has {n} pens and buys 2. How many has she?",
            "answer": f"{n} + 2 = <<{n}+2={n + 2}>>{n + 2}\n#### {n + 2}",
        }
        for n in range(number)
    ]


@pytest.mark.slow
def test_first_steps_and_gate_of_a_small_model(tmp_path):
    save_checkpoint(CHECKPOINTS["qwen2.5"], tmp_path / "model")
    copy_sources(tmp_path / "build")
    workflow = Workflow(tmp_path / "build", "--configfile", "small.yaml")
    (workflow.folder / "small.yaml").write_text(yaml.safe_dump(SMALL))
    with serving(PinnedHub) as hub:
        hub.repositories = {
            f"model/{MODEL['hub']}": {
                path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()
            },
            f"dataset/{DATASET['hub']}": {
                "main/train-00000-of-00001.parquet": as_parquet(problems(8)),
                "main/test-00000-of-00001.parquet": as_parquet(problems(4)),
                "socratic/train-00000-of-00001.parquet": as_parquet(problems(2)),
            },
        }
        workflow.environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
        workflow.environment |= {"HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1,localhost"}
        process = workflow.snakemake(f"output/rlhf/{RECIPE}", "--cores", "2")
    assert f"train_rlhf {RECIPE}: 2 of 2 steps" in process.stdout
    # A model of random weights solves no problem.
    assert process.returncode == 1
    assert "greedy_function_score is 0, and its gate needs at least 0.543" in process.stdout
