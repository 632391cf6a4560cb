"""lm-evaluation-harness, replaced by a stub (tests/bin/lm_eval): arguments, results, errors."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import evaluate_tasks
from conftest import ROOT
from snakechat.workflow.digests import file_digest
from snakechat.workflow.errors import InputError


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job with two tasks, one of them a file."""
    monkeypatch.setenv("PATH", str(ROOT / "tests/bin"), prepend=":")
    (tmp_path / "mine.yaml").write_text("task: mine\n")
    (tmp_path / "result").mkdir()
    settings = {"seed": 7, "dtype": "bf16", "tasks": ["arc_easy", "mine.yaml"], "limit": None}
    settings["apply_chat_template"] = False
    return SimpleNamespace(
        settings=SimpleNamespace(**settings),
        placement={"gpus_per_node": 0, "source": str(tmp_path)},
        spec={"files": {"mine.yaml": file_digest(tmp_path / "mine.yaml")}},
        inputs={"model": Path("output/rlhf/tiny")},
        result=tmp_path / "result",
        facts={},
    )


def arguments_of(job):
    """The arguments of lm_eval, which the stub returns as its results."""
    evaluate_tasks.main(job)
    # No file and no key that depends on the time and the machine.
    assert [path.name for path in job.result.iterdir()] == ["metrics.json"]
    metrics = json.loads((job.result / "metrics.json").read_text())
    assert metrics.keys() == {"results", "n-samples"}
    return metrics["results"]


def test_arguments_of_model_and_tasks(job, tmp_path):
    assert arguments_of(job) == {
        "--model": "hf",
        "--model_args": "pretrained=output/rlhf/tiny,dtype=bfloat16",
        "--tasks": f"arc_easy,{tmp_path / 'mine.yaml'}",
        "--device": "cpu",
        "--batch_size": "1",
        "--seed": "7",
    }
    assert job.facts == {"lm_eval": "0.0.1"}


def test_arguments_of_a_limit_on_a_gpu(job):
    job.settings.limit, job.placement["gpus_per_node"] = 20, 1
    found = arguments_of(job)
    assert (found["--limit"], found["--device"], found["--batch_size"]) == ("20", "cuda", "auto")


def test_a_model_that_training_partitions_is_divided_among_the_gpus(job):
    job.placement["gpus_per_node"] = 8
    found = arguments_of(job)["--model_args"]
    assert found.startswith("pretrained=output/rlhf/tiny,dtype=bfloat16,parallelize=True,")


def test_prompts_become_turns_by_the_chat_template_on_request(job):
    job.settings.apply_chat_template = True
    assert "--apply_chat_template" in arguments_of(job)


def test_a_missing_lm_eval_is_reported_with_what_to_install(job, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match=r"lm_eval is not on PATH: build with --sdm conda, or pip"):
        evaluate_tasks.main(job)


def test_the_status_of_a_failed_lm_eval_is_reported(job):
    job.settings.tasks = ["broken"]
    with pytest.raises(InputError, match="lm_eval exited with status 1"):
        evaluate_tasks.main(job)


def test_a_task_that_changed_after_planning_is_rejected(job, tmp_path):
    (tmp_path / "mine.yaml").write_text("task: other\n")
    with pytest.raises(InputError, match=r"mine\.yaml changed since this build was planned"):
        evaluate_tasks.main(job)


def test_a_file_that_a_task_refers_to_may_not_change_while_lm_eval_runs(job, tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    job.spec["files"]["rows.jsonl"] = file_digest(tmp_path / "rows.jsonl")
    run = evaluate_tasks.subprocess.run

    def run_and_edit(arguments):
        (tmp_path / "rows.jsonl").write_text("[]\n")
        return run(arguments)

    monkeypatch.setattr(evaluate_tasks.subprocess, "run", run_and_edit)
    with pytest.raises(InputError, match=r"rows\.jsonl changed while it was read"):
        evaluate_tasks.main(job)


def test_a_missing_task_file_is_reported_while_planning(sources):
    target = "output/lm_eval/sft/tiny.manifest.json"
    process = sources.snakemake(target, "-n", "--config", "lm_eval={tasks: [no.yaml]}")
    assert "error: config: lm_eval.tasks names no.yaml: there is no" in process.stdout
