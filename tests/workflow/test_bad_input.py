"""User errors and damaged data: an error of one line before any training, and no result is lost."""

import json

import pytest
import yaml

from conftest import Workflow, copy_sources
from support.files import as_parquet

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


GOOD = [
    {"prompt": f"\n\nHuman: {n}?\n\nAssistant:", "chosen": f" {n}.", "rejected": " No."}
    for n in range(20)
]


@pytest.fixture
def mine(sources):
    """A workflow with a local dataset that has been imported and split."""
    folder = sources.folder / "mine"
    folder.mkdir()
    (folder / "train.parquet").write_bytes(as_parquet(GOOD))
    mine = {"path": "mine", "format": "plain"}
    (sources.folder / "mine.yaml").write_text(yaml.safe_dump({"datasets": {"mine": mine}}))
    sources.options = ("--configfile", "mine.yaml")
    sources.build("output/split/mine.manifest.json")
    return sources


def test_a_damaged_dataset_stops_the_import_and_keeps_the_old_result(mine):
    target, path = "output/split/mine.manifest.json", mine.folder / "mine/train.parquet"
    records = mine.folder / "output/data/mine/train.parquet"
    before, imported = records.read_bytes(), records.stat().st_mtime_ns
    path.write_bytes(as_parquet([*GOOD, {**GOOD[7], "chosen": None}]))
    process = mine.snakemake(target, "--cores", "1")
    assert process.returncode == 1
    lines = [line for line in process.stdout.splitlines() if line.startswith("error: ")]
    assert len(set(lines)) == 1, process.stdout
    assert lines[0].startswith("error: mine/train.parquet: row 21: column chosen is null")
    assert "Traceback" not in process.stdout
    assert records.read_bytes() == before
    # With the good file again, the old result is reused.
    path.write_bytes(as_parquet(GOOD))
    mine.build(target)
    assert records.stat().st_mtime_ns == imported
    assert mine.planned(target) == set()


def test_a_path_with_braces_is_one_line(tmp_path):
    copy_sources(tmp_path / "{wildcards}")
    process = Workflow(tmp_path / "{wildcards}").snakemake("-n", "output/rlhf/tiny")
    assert process.returncode == 1
    assert process.stdout.strip().splitlines()[-1].startswith("error: "), process.stdout
