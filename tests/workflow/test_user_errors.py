"""Mistakes of users and of a first hour: one line, before any work where it can be known."""

import json
import re
import shutil

import pytest

# The checks of the config are in tests/unit/config/test_checks.py: these are ways into them.
MISTAKES = {
    "tiny": "config: rlhf.recipes.tiny.actor names 'tinny', which is not under sft.recipes",
    "nothing": "config: the target names 'nothing', which is not under rlhf.recipes",
}


def last_line(process):
    return process.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("recipe", MISTAKES)
def test_a_mistake_in_the_config_or_in_a_target_is_one_line(sources, recipe):
    actor = "sft/tinny" if recipe == "tiny" else "sft/tiny"
    change = f"rlhf={{recipes: {{tiny: {{actor: {actor}}}}}}}"
    process = sources.snakemake("-n", f"output/rlhf/{recipe}", "--config", change)
    assert process.returncode == 1
    assert last_line(process).startswith(f"error: {MISTAKES[recipe]}"), process.stdout
    assert "Traceback" not in process.stdout
    assert not (sources.folder / "output").exists()


def test_a_reward_function_that_cannot_be_imported_stops_the_build_before_its_first_job(sources):
    path = sources.folder / "rewards/mine.py"
    path.write_text("import no_such_library\n\n\ndef score(prompts, responses):\n    return []\n")
    recipe = {"rlhf": {"recipes": {"tiny": {"reward_functions": {"mine": 1}}}}}
    (sources.folder / "mine.yaml").write_text(json.dumps(recipe))
    process = sources.snakemake("output/rlhf/tiny", "--cores", "2", "--configfile", "mine.yaml")
    assert process.returncode == 1
    assert "error: rewards/mine.py: line 1: ModuleNotFoundError" in process.stdout
    assert "Traceback" not in process.stdout
    assert not (sources.folder / "output/logs").exists()


def test_a_job_refuses_to_run_with_another_version_of_a_library(sources):
    installed = sources.folder / "site/pyarrow-0.1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: pyarrow\nVersion: 0.1\n")
    target = "output/data/toy.manifest.json"
    sources.environment = {"PYTHONPATH": str(installed.parent)}
    process = sources.snakemake(target, "--cores", "1")
    assert process.returncode == 1
    assert "error: pyarrow 0.1 is installed, and this build was planned with" in process.stdout
    assert "pip install --no-deps --requirement requirements.txt" in process.stdout
    assert not (sources.folder / target).exists()


def test_a_missing_gpu_ends_the_build_before_its_first_job(sources):
    # A GPU of this machine is hidden.
    sources.environment = {"CUDA_VISIBLE_DEVICES": ""}
    process = sources.snakemake("--cores", "1", "output/rlhf/1.3b")
    assert process.returncode == 1
    assert re.match("error: .* needs a GPU.*--config deployment=cpu", last_line(process))
    assert not (sources.folder / "output/logs").exists()


def test_a_failed_build_ends_with_the_error_of_its_job(sources):
    (sources.folder / "mine").mkdir()
    (sources.folder / "mine/train.jsonl").write_text('{"prompt": "x"}\n')
    config = "datasets={mine: {path: mine, format: plain}}"
    target = "output/data/mine.manifest.json"
    process = sources.snakemake("--cores", "1", target, "--config", config)
    assert process.returncode == 1
    error = "error: mine/train.jsonl: row 1: column chosen is missing; the row has prompt: check"
    assert last_line(process).startswith(error)
    assert last_line(process).endswith(" (output/logs/import_dataset/mine.log)")
    assert "None" not in process.stdout
    assert process.stdout.count("--placement") == 1


def test_code_or_inputs_that_changed_after_planning_are_an_error(quick, tmp_path):
    """On a cluster a job may wait for hours between its planning and its start."""
    copy = quick.copy(tmp_path / "copy")

    def error_of(stage):
        result = f"output/eval/{stage}/tiny"
        (copy.folder / "spec.json").write_text(json.dumps(copy.spec_of(result)))
        # Otherwise it is kept.
        shutil.rmtree((copy.folder / result).resolve())
        program = f"scripts/evaluate_{stage}.py"
        process = copy.run("python", "scripts/launch.py", program, "--spec", "spec.json")
        assert process.returncode == 1
        return process.stdout

    with (copy.folder / "scripts/evaluate_reward.py").open("a") as program:
        program.write("\nassert True\n")
    assert error_of("reward") == (
        "error: evaluate_reward.py changed since this build was planned: start it again\n"
    )
    weights = copy.folder / "output/sft/tiny/model.safetensors"
    folder = weights.resolve().parent.relative_to(copy.folder.resolve())
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert error_of("sft") == (
        f"error: {folder}: model.safetensors has other content: start the build again, which"
        " makes it again\n"
    )
