"""lm-evaluation-harness: how it is called, what is kept of what it tells. A stub stands for it
(tests/bin/lm_eval).
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import evaluate_tasks
from conftest import ROOT
from snakechat.workflow.digests import file_digest
from snakechat.workflow.errors import InputError


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job of two tasks, one of them a file."""
    monkeypatch.setenv("PATH", str(ROOT / "tests/bin"), prepend=":")
    (tmp_path / "mine.yaml").write_text("task: mine\n")
    (tmp_path / "result").mkdir()
    settings = {"seed": 7, "dtype": "bf16", "tasks": ["arc_easy", "mine.yaml"], "limit": None}
    return SimpleNamespace(
        settings=SimpleNamespace(**settings),
        placement={"gpus_per_node": 0, "source": str(tmp_path)},
        spec={"files": {"mine.yaml": file_digest(tmp_path / "mine.yaml")}},
        inputs={"model": Path("output/rlhf/tiny")},
        result=tmp_path / "result",
        facts={},
    )


def called(job):
    """What lm_eval was called with."""
    evaluate_tasks.main(job)
    # Nothing that depends on when and where it ran.
    assert [path.name for path in job.result.iterdir()] == ["metrics.json"]
    figures = json.loads((job.result / "metrics.json").read_text())
    assert figures.keys() == {"results", "n-samples"}
    return figures["results"]


def test_it_is_called_with_model_and_tasks(job, tmp_path):
    assert called(job) == {
        "--model": "hf",
        "--model_args": "pretrained=output/rlhf/tiny,dtype=bfloat16",
        "--tasks": f"arc_easy,{tmp_path / 'mine.yaml'}",
        "--device": "cpu",
        "--batch_size": "1",
        "--seed": "7",
    }
    assert job.facts == {"lm_eval": "0.0.1"}


def test_it_takes_a_part_of_each_task_on_a_gpu(job):
    job.settings.limit, job.placement["gpus_per_node"] = 20, 1
    told = called(job)
    assert (told["--limit"], told["--device"], told["--batch_size"]) == ("20", "cuda", "auto")


def test_without_it_one_line_says_what_to_install(job, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match=r"lm_eval is not on PATH: build with --sdm conda, or pip"):
        evaluate_tasks.main(job)


def test_where_it_fails_its_status_is_told(job):
    job.settings.tasks = ["broken"]
    with pytest.raises(InputError, match="lm_eval ended with status 1"):
        evaluate_tasks.main(job)


def test_a_task_that_was_edited_since_is_refused(job, tmp_path):
    (tmp_path / "mine.yaml").write_text("task: other\n")
    with pytest.raises(InputError, match=r"mine\.yaml changed since this build was planned"):
        evaluate_tasks.main(job)


def test_its_environment_is_the_pins_and_one_version_of_it():
    packages = yaml.safe_load((ROOT / "envs/lm-eval.yaml").read_text())["dependencies"]
    requirements, harness = packages[-1]["pip"]
    assert requirements == "-r ../../requirements.txt"
    assert re.fullmatch(r"lm_eval\[hf\]==[0-9.]+", harness)


def test_a_task_file_that_is_not_there_is_told_while_planning(sources):
    target = "output/lm_eval/sft/tiny.manifest.json"
    process = sources.snakemake(target, "-n", "--config", "lm_eval={tasks: [no.yaml]}")
    assert "error: config: lm_eval.tasks names no.yaml: there is no" in process.stdout
