"""Options of Snakemake whose usual meaning does not fit results that are stale by content."""

import subprocess

import pytest

from conftest import ROOT


@pytest.fixture
def tree(quick, tmp_path):
    """A copy of the quick build."""
    return quick.copy(tmp_path / "tree")


def states(folder):
    """Return size and times of all files of a tree but Snakemake's own."""
    return {
        path: (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for path in folder.rglob("*")
        if not {".snakemake", "__pycache__"} & set(path.parts)
        for status in [path.stat()]
    }


def test_options_that_do_not_fit_name_what_does(quick):
    before = states(quick.folder)
    for options, advice in (
        (("--touch", "--config", "seed=5"), "scripts/accept.py"),
        (("--delete-all-output",), "make clean-output"),
        (("--list-untracked",), "store.py list"),
        (("--cache", "--cores", "1"), "the store keeps"),
    ):
        process = quick.snakemake("output/sft/tiny", *options)
        last = process.stdout.strip().splitlines()[-1]
        assert process.returncode == 1 and "Traceback" not in process.stdout
        assert last.startswith("error: --") and advice in last
    after = states(quick.folder)
    assert {path: after[path] for path in before} == before


def test_a_dry_run_names_what_has_changed_and_writes_nothing(tree):
    """The reasons of its first jobs; those of the others are the jobs before them."""
    with (tree.folder / "scripts/snakechat/algorithms/preference.py").open("a") as module:
        module.write("\nassert True\n")
    (tree.folder / "output/eval/dpo/tiny.manifest.json").unlink()
    before = states(tree.folder)
    for options in (("--forceall",), ("--config", "reward={recipes: {tiny: {epochs: 7}}}")):
        process = tree.snakemake("output/dpo/tiny", "output/reward/tiny", "-n", *options)
        assert process.returncode == 0
    reasons = [line for line in process.stdout.splitlines() if line.startswith("Reason:")]
    for reason in ("snakechat/algorithms/preference.py changed", "epochs changed from"):
        assert any(reason in line for line in reasons), reasons
    assert states(tree.folder) == before


def test_a_dry_run_of_a_fresh_tree_writes_nothing(sources):
    # Python itself writes byte code.
    sources.environment = {**sources.environment, "PYTHONDONTWRITEBYTECODE": "1"}
    before = states(sources.folder)
    assert sources.snakemake("output/rlhf/tiny", "-n").returncode == 0
    assert states(sources.folder) == before


def forced_runs(workflow, *options):
    """Build with options; return the paths of the results that were made again, as they were."""
    output = workflow.build(*options)
    lines = (line for line in output.splitlines() if "the forced run made" in line)
    paths, outcomes = zip(*(line.split(": ") for line in lines), strict=True)
    assert {*outcomes} == {"the forced run made the same bytes"}
    return {*paths}


def test_a_forced_job_computes_its_result_again(tree):
    log = tree.folder / "output/logs/train_sft/tiny.log"
    log.write_text("the log of the last run\n")
    made = {"output/sft/tiny", "output/eval/sft/tiny"}
    assert forced_runs(tree, "output/sft/tiny", "--force") == made
    assert "the log of the last run" not in log.read_text()
    assert tree.planned("output/eval/sft/tiny.manifest.json") == set()


def test_all_jobs_make_the_same_bytes_again(tree):
    paths = (tree.folder / "output").rglob("*.manifest.json")
    results = {path.relative_to(tree.folder).as_posix()[: -len(".manifest.json")] for path in paths}
    assert len(results) == 18
    assert forced_runs(tree, "output/rlhf/tiny", "output/dpo/tiny", "--forceall") == results


def test_make_clean_output_deletes_results_and_the_state_of_snakemake(tmp_path):
    for name in ("output/sft/tiny", "output/store", ".snakemake/log", "mydata"):
        (tmp_path / name).mkdir(parents=True)
    command = ["make", "--file", ROOT / "Makefile", "clean-output"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mydata"]


def test_folders_and_files_of_results_are_targets(quick):
    """No rule has them as outputs: the results' manifests are."""
    target = "output/eval/sft/tiny/metrics.json"
    assert "Nothing to be done" in quick.snakemake(target, "-n").stdout
    forced = quick.snakemake(target, "-n", "-f")
    assert "evaluate_sft" in forced.stdout and "train_sft" not in forced.stdout, forced.stdout
