"""Options of Snakemake whose usual meaning does not fit results that are stale by content."""

import re

import pytest


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
        (("output/sft/tiny/absent", "-n"), "output/sft/tiny has no such file"),
    ):
        process = quick.snakemake("output/sft/tiny", *options)
        last = process.stdout.strip().splitlines()[-1]
        assert process.returncode == 1 and "Traceback" not in process.stdout
        assert last.startswith("error: ") and advice in last
    after = states(quick.folder)
    assert {path: after[path] for path in before} == before


def test_a_dry_run_names_what_has_changed_and_writes_nothing(tree):
    """The first jobs have reasons; the jobs before them are the reasons of the others."""
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


def test_all_jobs_that_are_forced_make_the_same_bytes_again(tree):
    paths = (tree.folder / "output").rglob("*.manifest.json")
    results = {path.relative_to(tree.folder).as_posix()[: -len(".manifest.json")] for path in paths}
    assert len(results) == 18
    output = tree.build("output/rlhf/tiny", "output/dpo/tiny", "--forceall")
    made = re.findall("^(.*): the forced run made the same bytes$", output, re.MULTILINE)
    assert {*made} == results and output.count("the forced run made") == 18
