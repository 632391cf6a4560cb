"""User errors and damaged data: an error of one line before any training, and no result is lost."""

import json

import pytest
import yaml

from conftest import Workflow, copy_sources
from support.files import as_parquet

# The checks of the config are in tests/unit/config/test_cross_checks.py: these are ways into them.
CONFIGS = {
    "schema": (
        "sft: {recipes: {tiny: {learning_rate: -1e-5}}}",
        "config: sft.recipes.tiny.learning_rate: Input should be greater than 0, found '-1e-5'",
    ),
    "reference": (
        "rlhf: {recipes: {tiny: {actor: sft/tinny}}}",
        "config: rlhf.recipes.tiny.actor names 'tinny', which is not under sft.recipes",
    ),
}


@pytest.mark.parametrize("mistake", CONFIGS)
def test_mistake_in_the_config_is_one_line(sources, mistake):
    text, expected = CONFIGS[mistake]
    (sources.folder / "mine.yaml").write_text(text)
    process = sources.snakemake("-n", "output/rlhf/tiny", "--configfile", "mine.yaml")
    assert process.returncode == 1
    last = process.stdout.strip().splitlines()[-1]
    assert last.startswith(f"error: {expected}"), process.stdout
    assert "Traceback" not in process.stdout
    assert not (sources.folder / "output").exists()


def test_unknown_recipe_is_reported_with_the_available_ones(sources):
    process = sources.snakemake("-n", "output/rlhf/nothing")
    assert (
        process.stdout.strip()
        .splitlines()[-1]
        .startswith("error: config: rlhf.recipes has no 'nothing' (available: 1.3b,")
    )


def test_a_reward_function_that_cannot_be_imported_stops_the_build_before_its_first_job(sources):
    path = sources.folder / "rewards/mine.py"
    path.write_text("import no_such_library\n\n\ndef score(prompts, responses):\n    return []\n")
    recipe = {"rlhf": {"recipes": {"tiny": {"reward_functions": {"mine": 1}}}}}
    (sources.folder / "mine.yaml").write_text(json.dumps(recipe))
    command = ("output/rlhf/tiny", "--cores", "2", "--configfile", "mine.yaml")
    process = sources.snakemake(*command)
    assert process.returncode == 1
    assert "error: rewards/mine.py: line 1: ModuleNotFoundError" in process.stdout
    assert "Traceback" not in process.stdout
    assert not (sources.folder / "output/logs").exists()
    # Of a build without it, and of a dry run, it is no part.
    process = sources.snakemake("output/data/toy.manifest.json", *command[1:], "-n")
    assert process.returncode == 0, process.stdout


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
    # What is installed is not part of a spec: with the right version, the job is the same.
    planned = sources.planned(target)
    sources.environment = {}
    assert sources.planned(target) == planned


GOOD = [
    {"prompt": f"\n\nHuman: {n}?\n\nAssistant:", "chosen": f" {n}.", "rejected": " No."}
    for n in range(20)
]


# The chosen response of row 8 is missing.
WITH_NULL = [*GOOD[:7], {**GOOD[7], "chosen": None}, *GOOD[8:]]


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
    for damage, expected in (
        (as_parquet(WITH_NULL), "row 8: column chosen is null"),
        (as_parquet(GOOD)[:-20], "damaged or truncated after row 0 ("),
    ):
        path.write_bytes(damage)
        process = mine.snakemake(target, "--cores", "1")
        assert process.returncode == 1
        lines = [line for line in process.stdout.splitlines() if line.startswith("error: ")]
        assert len(set(lines)) == 1, process.stdout
        assert lines[0].startswith(f"error: mine/train.parquet: {expected}")
        assert "Traceback" not in process.stdout
        assert records.read_bytes() == before
    # With the good file again, the old result is reused.
    path.write_bytes(as_parquet(GOOD))
    mine.build(target)
    assert records.stat().st_mtime_ns == imported
    assert mine.planned(target) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "options", "error"),
    [
        ("{wildcards}", (), "error: "),
        ("it's; $(touch X)", ("--config", "seed=.inf"), "error: config: seed: "),
    ],
)
def test_a_path_or_number_that_cannot_be_used_is_one_line(tmp_path, folder, options, error):
    copy_sources(tmp_path / folder)
    process = Workflow(tmp_path / folder).snakemake("-n", "output/rlhf/tiny", *options)
    assert process.returncode == 1
    assert process.stdout.strip().splitlines()[-1].startswith(error), process.stdout
    assert "Traceback" not in process.stdout
