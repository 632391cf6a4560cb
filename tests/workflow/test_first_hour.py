"""Mistakes of a first hour: one line before any work."""

import re

GPU_RECIPE = "output/rlhf/1.3b"


def last_line(process):
    return process.stdout.strip().splitlines()[-1]


def test_a_missing_gpu_ends_the_build_before_its_first_job(sources):
    # A GPU of this machine is hidden.
    sources.environment = {"CUDA_VISIBLE_DEVICES": ""}
    process = sources.snakemake("--cores", "1", GPU_RECIPE)
    assert process.returncode == 1
    assert re.match("error: .* needs a GPU.*--config deployment=cpu", last_line(process))
    assert not (sources.folder / "output/logs").exists()


def test_results_of_another_config_are_named(sources):
    manifest = sources.folder / "output/rlhf/mine.manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    for output in (
        sources.snakemake("-n").stdout,
        sources.run("python", "scripts/explain.py").stdout,
    ):
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
        " format, columns and keep of the dataset (output/logs/import_dataset/mine.log)"
    )
    assert "None" not in process.stdout
    assert process.stdout.count("--placement") == 1
