"""verify.py prints a line for each damaged result of an output tree, and nothing else."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT


@pytest.fixture
def tree(quick, tmp_path):
    """A copy of the output of the quick build."""
    return shutil.copytree(quick.folder / "output", tmp_path / "output", symlinks=True)


def verify(folder, *arguments):
    """Run verify.py in a folder; return its exit code and its lines."""
    command = [sys.executable, ROOT / "scripts/verify.py", *arguments]
    process = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return process.returncode, process.stdout.splitlines()


def summary_of(tree):
    """Return the beginning of the summary line: results, files and bytes of a tree."""
    manifests = [json.loads(path.read_text()) for path in tree.rglob("*.manifest.json")]
    sizes = [file["size"] for manifest in manifests for file in manifest["files"].values()]
    return f"{len(manifests)} results, {len(sizes)} files, {sum(sizes):,} bytes"


def test_a_build_has_no_problems(tree):
    # Files of users, of Snakemake and of killed jobs are not results.
    (tree / "notes.txt").write_text("mine")
    (tree / "sft/notes.txt").write_text("mine")
    (tree / "sft/tiny/.snakemake_timestamp").touch()
    shutil.copytree(tree / "sft/tiny", tree / "store/train_sft/tiny/.0a1b.tmp")
    (tree / "state/train_sft/tiny-0123/00000020").mkdir(parents=True)
    (tree / "state/train_sft/tiny-0123/00000020/files.json").write_text("{}")
    assert verify(tree.parent) == (0, [f"{summary_of(tree)}: all as recorded"])


def test_a_tree_may_be_renamed_or_checked_by_subfolder(tree, tmp_path):
    moved = tree.rename(tmp_path / "moved")
    whole = verify(tmp_path, "moved")
    assert whole[0] == 0 and whole[1][0].startswith("18 results")
    assert verify(tmp_path, "moved/store") == whole
    assert verify(moved, "eval") == (0, [f"{summary_of(moved / 'eval')}: all as recorded"])


def flip(path):
    """Flip one bit of a file."""
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)


def edit(path, change):
    """Apply a change to the dict of a manifest."""
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


def other_build(tree):
    """Replace a manifest by one of another learning rate and other weights."""

    def change(manifest):
        manifest["spec"]["settings"]["actor_learning_rate"] = 0.5
        manifest["files"]["model.safetensors"]["sha256"] = "0" * 64

    edit(tree / "rlhf/tiny/manifest.json", change)


def earlier_version(tree):
    """Add a version of a result that its path does not lead to, under a wrong key."""
    version = tree / "store/train_sft/tiny" / ("0" * 32)
    shutil.copytree(tree / "sft/tiny", version, symlinks=True)


# Results that read the RLHF model, by their keys for it.
READ = {"eval/rlhf": "rlhf", "report/rlhf": "train_rlhf"}


def downstream(problem, readers=READ, path="output/rlhf/tiny"):
    """Return the lines of results that read a result."""
    return [f"output/{stage}/tiny: input {key}: {path} {problem}" for stage, key in readers.items()]


TOKENS = {"rlhf": "tokens", "eval/rlhf": "tokens", "report/rlhf": "tokens.rlhf"}
DAMAGES = {
    "a flipped bit": (
        lambda tree: flip(tree / "rlhf/tiny/model.safetensors"),
        ["output/rlhf/tiny: model.safetensors has other content"],
    ),
    "the manifest of another build": (
        other_build,
        [
            "output/rlhf/tiny: manifest.json belongs to another result",
            *downstream("changed after this result was made"),
        ],
    ),
    "an earlier version": (
        earlier_version,
        [f"output/store/train_sft/tiny/{'0' * 32}: manifest.json belongs to another result"],
    ),
    "a link under another name": (
        lambda tree: (tree / "rlhf/other").symlink_to("tiny"),
        ["output/rlhf/other: leads to a result of output/rlhf/tiny"],
    ),
    "a truncated manifest": (
        lambda tree: os.truncate(tree / "rlhf/tiny/manifest.json", 100),
        ["output/rlhf/tiny/manifest.json: cannot be read", *downstream("cannot be read")],
    ),
    "an input without its folder": (
        lambda tree: shutil.rmtree(tree / "store/tokenize_rlhf"),
        [
            "output/tokens/rlhf/tiny: missing",
            *downstream("is missing", TOKENS, "output/tokens/rlhf/tiny"),
        ],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_reported_by_exactly_these_lines(tree, damage):
    apply, expected = DAMAGES[damage]
    apply(tree)
    code, (*lines, summary) = verify(tree.parent)
    assert sorted(lines) == sorted(expected)
    assert summary.endswith(f" bytes: {len(expected)} problems")
    assert code == 1


@pytest.fixture
def twin(tree):
    """The same build in a second folder."""
    return shutil.copytree(tree, tree.parent / "twin", symlinks=True)


def test_differences_from_another_build_are_reported_by_file(tree, twin):
    # Additional results in the other tree are ignored.
    (twin / "data/more").symlink_to("toy")
    assert verify(tree.parent, "output", "--same-as", "twin") == (
        0,
        [f"{summary_of(tree)}: the same as in twin"],
    )
    flip(twin / "rlhf/tiny/model.safetensors")
    (twin / "eval/sft/tiny").unlink()
    edit(twin / "split/toy/manifest.json", lambda manifest: manifest["facts"].update(more=1))
    flip(twin / "eval/rlhf/tiny/metrics.json")
    sha256 = hashlib.sha256((twin / "eval/rlhf/tiny/metrics.json").read_bytes()).hexdigest()
    edit(
        twin / "eval/rlhf/tiny/manifest.json",
        lambda manifest: manifest["files"]["metrics.json"].update(sha256=sha256),
    )
    edit(twin / "models/tiny/manifest.json", lambda m: m["spec"]["settings"].update(seed=5))
    code, (*lines, summary) = verify(tree.parent, "output", "--same-as", "twin")
    assert code == 1 and summary.endswith("problems")
    assert set(lines) >= {
        "twin/rlhf/tiny: model.safetensors has other content",
        "output/eval/rlhf/tiny/metrics.json: differs from twin/eval/rlhf/tiny/metrics.json",
        "twin/eval/sft/tiny: has no manifest",
        "output/split/toy/manifest.json: differs from twin/split/toy/manifest.json",
        "twin/models/tiny: was made from another spec",
    }


@pytest.mark.parametrize(
    ("folder", "message"),
    [("nowhere", "there is no folder nowhere"), ("output/specs", "no results in output/specs")],
)
def test_a_folder_without_results_is_a_usage_error(tree, folder, message):
    code, lines = verify(tree.parent, folder)
    assert code == 2
    assert lines[-1] == f"verify.py: error: {message}"
