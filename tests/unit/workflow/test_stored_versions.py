"""Versions of recipes in the store, on small results."""

import os
from collections import Counter
from pathlib import Path

import pytest

from snakechat.workflow.errors import InputError
from snakechat.workflow.links import find_version, link_result, read_version_file
from snakechat.workflow.manifest import read_manifest
from support.stored_results import make_result

STORE = Path("output/store")


@pytest.fixture(autouse=True)
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def add_training(weights):
    """Store a training of the recipe `mine`; return its folder and its manifest."""
    folder = make_result(STORE, {"model": weights, "metrics.jsonl": "{}"}, weights=weights)
    link_result("output/sft/mine", folder)
    return folder, read_manifest(folder / "manifest.json")


def add_evaluation(training, metrics):
    """Store an evaluation of a training, given its manifest; return its folder."""
    files, inputs = {"metrics.json": metrics}, {"model": training}
    folder = make_result(STORE, files, "evaluate_sft", inputs, evaluation=metrics)
    link_result("output/eval/sft/mine", folder)
    return folder


def test_a_version_is_a_training_and_the_newest_evaluation_of_it():
    first, first_manifest = add_training("first")
    _, second_manifest = add_training("second")
    old = add_evaluation(first_manifest, "1")
    new = add_evaluation(first_manifest, "2")
    add_evaluation(second_manifest, "3")
    os.utime(old, (0, 0))
    version = find_version("sft", f"mine@{first.name[:8]}")
    assert version == (first.resolve(), new.resolve())
    assert read_version_file(version.evaluation, "metrics.json") == "2"
    assert all(path.is_file() for path in version.files().values())


def test_versions_that_are_not_there_are_an_error_that_names_the_list():
    folder, _ = add_training("first")
    names = [folder.name, *(add_training(str(number))[0].name for number in range(16))]
    # Two of 17 keys start with the same digit.
    [(digit, _)] = Counter(name[0] for name in names).most_common(1)
    listing = "python scripts/store.py list output/sft/mine"
    for name, message in {
        "mine@xyz": f"output/sft/mine has no version with this key: {listing}",
        "mine@": f"output/sft/mine has several versions with this key: {listing}",
        f"mine@{digit}": f"output/sft/mine has several versions with this key: {listing}",
        f"mine@{folder.name}": "there is no evaluation of",
    }.items():
        with pytest.raises(InputError) as error:
            find_version("sft", name)
        assert message in str(error.value)


def test_a_damaged_file_is_not_compared():
    _, manifest = add_training("first")
    evaluation = add_evaluation(manifest, "1")
    (evaluation / "metrics.json").write_text("2")
    with pytest.raises(InputError, match="is damaged or was removed"):
        read_version_file(evaluation, "metrics.json")
