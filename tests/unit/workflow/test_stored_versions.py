"""Versions of recipes in the store, on small results."""

import os

import pytest

from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import content_digest, read_manifest
from snakechat.workflow.stored_versions import find_version, read_version_file
from support.stored_results import make_result


def add_training(store, weights):
    """Store a training of the recipe `mine`; return its folder and the digest of its content."""
    folder = make_result(store, "mine", {"model": weights, "metrics.jsonl": "{}"}, weights=weights)
    return folder, content_digest(read_manifest(folder / "manifest.json"))


def add_evaluation(store, content, metrics):
    """Store an evaluation of a training; return its folder."""
    files = {"metrics.json": metrics}
    inputs = {"model": content}
    return make_result(store, "mine", files, "evaluate_sft", inputs, evaluation=metrics)


def test_a_version_is_a_training_and_the_newest_evaluation_of_it(tmp_path):
    first, first_content = add_training(tmp_path, "first")
    _, second_content = add_training(tmp_path, "second")
    old = add_evaluation(tmp_path, first_content, "1")
    new = add_evaluation(tmp_path, first_content, "2")
    add_evaluation(tmp_path, second_content, "3")
    os.utime(old, (0, 0))
    version = find_version(tmp_path, "sft", f"mine@{first.name[:8]}")
    assert version == (first, new)
    assert read_version_file(version.evaluation, "metrics.json") == "2"
    assert all(path.is_file() for path in version.files().values())


def test_versions_that_are_not_there_are_an_error_that_names_the_list(tmp_path):
    folder, _ = add_training(tmp_path, "first")
    add_training(tmp_path, "second")
    listing = "python scripts/store.py list output/sft/mine"
    for name, message in {
        "mine@xyz": f"no version of output/sft/mine with this key: {listing}",
        "mine@": f"several versions of output/sft/mine with this key: {listing}",
        f"mine@{folder.name}": "no evaluation of",
    }.items():
        with pytest.raises(InputError) as error:
            find_version(tmp_path, "sft", name)
        assert message in str(error.value)


def test_a_damaged_file_is_not_compared(tmp_path):
    _, content = add_training(tmp_path, "first")
    evaluation = add_evaluation(tmp_path, content, "1")
    (evaluation / "metrics.json").write_text("2")
    with pytest.raises(InputError, match="is damaged or was removed"):
        read_version_file(evaluation, "metrics.json")
