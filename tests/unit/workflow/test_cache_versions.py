"""Versions of recipes in the cache, on small results."""

import json
import os

import pytest

from snakechat.workflow.cache_versions import find_version, read_version_file
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import content_digest, read_manifest, result_key
from snakechat.workflow.result_cache import ResultCache
from support.cached_results import make_result, write_manifest


@pytest.fixture
def cache(tmp_path):
    return ResultCache(tmp_path / "cache", None)


def add_training(cache, folder, weights):
    """Store a training of the recipe `mine`; return its key and the digest of its content."""
    folder = folder / weights / "mine"
    key = make_result(folder, {"model": weights, "metrics.jsonl": "{}"}, weights=weights)
    cache.put(key, folder)
    return key, content_digest(read_manifest(folder / "manifest.json"))


def add_evaluation(cache, folder, content, metrics):
    """Store an evaluation of a training; return its key."""
    folder = folder / f"eval-{metrics}" / "mine"
    make_result(folder, {"metrics.json": metrics}, evaluation=metrics)
    manifest = read_manifest(folder / "manifest.json")
    manifest["inputs"] = {"model": content}
    manifest["spec"] |= {"path": "output/eval/sft/mine", "inputs": {"model": {}}}
    write_manifest(folder, manifest)
    key = result_key(manifest["spec"], manifest["inputs"])
    cache.put(key, folder)
    return key


def test_a_version_is_a_training_and_the_newest_evaluation_of_it(cache, tmp_path):
    first, first_content = add_training(cache, tmp_path, "first")
    _, second_content = add_training(cache, tmp_path, "second")
    old = add_evaluation(cache, tmp_path, first_content, "1")
    new = add_evaluation(cache, tmp_path, first_content, "2")
    add_evaluation(cache, tmp_path, second_content, "3")
    record = next(cache.folder.glob(f"*/{old}/entry.json"))
    record.write_text(json.dumps(json.loads(record.read_text()) | {"created": "2020-01-01"}))
    version = find_version(cache.folder, "sft", f"mine@{first[:8]}")
    assert version.training.parent.name == first
    assert version.evaluation.parent.name == new
    assert read_version_file(version.evaluation, "metrics.json") == "2"
    assert all(path.is_file() for path in version.files().values())


def test_versions_that_are_not_there_are_an_error_that_names_the_list(cache, tmp_path):
    key, _ = add_training(cache, tmp_path, "first")
    add_training(cache, tmp_path, "second")
    listing = f"python scripts/cache.py list output/sft/mine --cache {cache.folder}"
    for name, message in {
        "mine@xyz": f"no version of output/sft/mine with this key: {listing}",
        "mine@": f"several versions of output/sft/mine with this key: {listing}",
        f"mine@{key}": "no evaluation of",
    }.items():
        with pytest.raises(InputError) as error:
            find_version(cache.folder, "sft", name)
        assert message in str(error.value)


def test_a_damaged_file_is_not_compared(cache, tmp_path):
    key, content = add_training(cache, tmp_path, "first")
    add_evaluation(cache, tmp_path, content, "1")
    version = find_version(cache.folder, "sft", f"mine@{key}")
    path = version.evaluation / "metrics.json"
    os.unlink(path)
    path.write_text("2")
    with pytest.raises(InputError, match=f"{path} is damaged or was removed"):
        read_version_file(version.evaluation, "metrics.json")
