"""User errors: one line before any job."""

import json

import pytest

# The checks of the config are in tests/unit/config/test_cross_checks.py: these are ways into them.
MISTAKES = {
    "tiny": "config: rlhf.recipes.tiny.actor names 'tinny', which is not under sft.recipes",
    "nothing": "config: rlhf.recipes has no 'nothing' (available: 1.3b,",
}


@pytest.mark.parametrize("recipe", MISTAKES)
def test_a_mistake_in_the_config_or_in_a_target_is_one_line(sources, recipe):
    actor = "sft/tinny" if recipe == "tiny" else "sft/tiny"
    change = f"rlhf={{recipes: {{tiny: {{actor: {actor}}}}}}}"
    process = sources.snakemake("-n", f"output/rlhf/{recipe}", "--config", change)
    assert process.returncode == 1
    last = process.stdout.strip().splitlines()[-1]
    assert last.startswith(f"error: {MISTAKES[recipe]}"), process.stdout
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
