"""verify.py prints a line for each damaged result of an output tree, and nothing else."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT
from snakechat.workflow.manifest import file_digest, read_sealed, sealed_json


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


def test_a_build_has_no_problems_wherever_it_is(tree, tmp_path):
    # Files of users, of Snakemake and of killed jobs are not results.
    (tree / "sft/notes.txt").write_text("mine")
    (tree / "sft/tiny/.snakemake_timestamp").touch()
    work = tree / f"store/train_sft/.{'0' * 32}"
    shutil.copytree(tree / "sft/tiny", work / "result")
    (work / "state/00000020").mkdir(parents=True)
    assert verify(tree.parent) == (0, [f"{summary_of(tree)}: all as recorded"])
    # Results that were made without limits are counted.
    for model in ("sft", "reward"):
        path = tree / model / "tiny/run.json"
        path.write_text(sealed_json(read_sealed(path) | {"hermetic": 0}))
    moved = tree.rename(tmp_path / "moved")
    assert summary_of(moved).startswith("18 results")
    line = f"{summary_of(moved).replace(' results', ' results, 2 not hermetic')}: all as recorded"
    assert verify(tmp_path, "moved") == verify(tmp_path, "moved/store") == (0, [line])
    assert verify(moved, "eval") == (0, [f"{summary_of(moved / 'eval')}: all as recorded"])
    code, lines = verify(moved, "specs")
    assert (code, lines[-1]) == (2, "verify.py: error: no results in specs")


def flip(path):
    """Flip one bit of a file."""
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)


def edit(path, change):
    """Apply a change to a manifest."""
    change(manifest := read_sealed(path))
    path.write_text(sealed_json(manifest))


def test_each_damage_is_reported_by_exactly_these_lines(tree):
    flip(tree / "rlhf/tiny/model.safetensors")
    # The manifest of another build.
    edit(tree / "dpo/tiny/manifest.json", lambda m: m["spec"]["settings"].update(beta=0.7))
    # A version that no path leads to, under a wrong key.
    version = f"store/train_sft/{'0' * 32}"
    shutil.copytree((tree / "sft/tiny/manifest.json").resolve().parent, tree / version)
    # Edited by a program that writes a new file.
    (tree / "rlhf/tiny/config.json").unlink()
    (tree / "rlhf/tiny/config.json").write_text("{}")
    os.truncate(tree / "eval/sft/tiny/manifest.json", 100)
    shutil.rmtree(tree / "store/tokenize_rlhf")
    stored = (tree / "rlhf/tiny/manifest.json").resolve().parent
    expected = [
        "output/rlhf/tiny: model.safetensors has other content",
        "output/dpo/tiny: manifest.json belongs to another result",
        f"output/{version}: manifest.json belongs to another result",
        f"output/rlhf/tiny/config.json: is not the file of {stored}",
        "output/eval/sft/tiny: manifest.json cannot be read",
        "output/tokens/rlhf/tiny: missing",
    ]
    code, (*lines, summary) = verify(tree.parent)
    assert sorted(lines) == sorted(expected)
    assert summary.endswith(f" bytes: {len(expected)} problems")
    assert code == 1


def test_differences_from_another_build_are_reported_by_file(tree):
    twin = shutil.copytree(tree, tree.parent / "twin", symlinks=True)
    # Additional results in the other tree are ignored.
    (twin / "data/more").symlink_to("toy")
    assert verify(tree.parent, "output", "--same-as", "twin") == (
        0,
        [f"{summary_of(tree)}: the same as in twin"],
    )
    flip(twin / "rlhf/tiny/model.safetensors")
    (twin / "eval/sft/tiny").unlink()
    edit(twin / "split/toy/manifest.json", lambda manifest: manifest["facts"].update(more=1))
    metrics = twin / "eval/rlhf/tiny/metrics.json"
    flip(metrics)
    edit(
        twin / "eval/rlhf/tiny/manifest.json",
        lambda manifest: manifest["files"]["metrics.json"].update(sha256=file_digest(metrics)),
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
