"""Mistakes of a first hour: a warning while planning, or one line before any work."""

import re
import shlex

import pytest

from conftest import ROOT
from support.files import as_jsonl

GPU_RECIPE = "output/rlhf/1.3b"


def last_line(process):
    return process.stdout.strip().splitlines()[-1]


@pytest.fixture
def without_gpu(sources):
    """Fresh sources on a machine that has no GPU, or hides it."""
    sources.environment = {"CUDA_VISIBLE_DEVICES": ""}
    return sources


def test_planning_warns_of_a_missing_gpu_once(without_gpu):
    process = without_gpu.snakemake("-n", GPU_RECIPE)
    assert process.returncode == 0
    (warning,) = re.findall("^warning: .*$", process.stdout, re.MULTILINE)
    assert "needs a GPU" in warning and "--config deployment=cpu" in warning
    process = without_gpu.snakemake("-n", GPU_RECIPE, "--config", "deployment=cpu")
    assert process.returncode == 0 and "warning" not in process.stdout


def test_a_missing_gpu_ends_the_build_before_its_first_job(without_gpu):
    process = without_gpu.snakemake("--cores", "1", GPU_RECIPE)
    assert process.returncode == 1
    assert re.match("error: .* needs a GPU.*--config deployment=cpu", last_line(process))
    assert not (without_gpu.folder / "output/logs").exists()


def test_results_of_another_config_are_named(sources):
    manifest = sources.folder / "output/rlhf/mine.manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    outputs = [
        sources.snakemake("-n").stdout,
        sources.snakemake("--report", "report.html").stdout,
        sources.run("python", "scripts/explain.py").stdout,
    ]
    for output in outputs:
        assert output.count("not in this config: rlhf/mine:") == 1, output
    assert "not in this config" not in sources.snakemake("-n", "output/sft/tiny").stdout


def test_a_failed_build_ends_with_the_error_of_its_job(sources):
    (sources.folder / "mine").mkdir()
    (sources.folder / "mine/train.jsonl").write_text('{"prompt": "x"}\n')
    config = "datasets={mine: {path: mine, format: plain}}"
    target = "output/data/mine.manifest.json"
    process = sources.snakemake("--cores", "1", target, "--config", config)
    assert process.returncode == 1
    assert last_line(process) == (
        "error: mine/train.jsonl: row 1: column chosen is missing; the row has prompt: check"
        " format, columns and keep of the dataset"
    )
    assert "None" not in process.stdout
    assert process.stdout.count("--placement") == 1


def test_the_example_with_own_data_plans_on_a_cpu(without_gpu):
    command = write_example(without_gpu.folder)
    process = without_gpu.snakemake(*command, "-n")
    assert process.returncode == 0, process.stdout
    assert "needs a GPU" not in process.stdout


def write_example(folder):
    """Write the config and data of the example with own data; return its options of Snakemake."""
    section = re.split("\n## ", (ROOT / "README.md").read_text())
    (text,) = [part for part in section if "mydata" in part]
    (folder / "mine.yaml").write_text(re.search("```yaml\n(.*?)```", text, re.DOTALL)[1])
    (folder / "mydata").mkdir()
    rows = [
        {"prompt": f"\n\nHuman: {n}?\n\nAssistant:", "chosen": f" {n}.", "rejected": " No."}
        for n in range(150)
    ]
    (folder / "mydata/train.jsonl").write_bytes(as_jsonl(rows))
    program, *options = shlex.split(re.search("```\n(snakemake.*)\n", text)[1])
    assert program == "snakemake"
    return options
