"""Names: links to results, wherever folders of output/ are, whatever names are; versions."""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from snakechat.workflow.errors import InputError
from snakechat.workflow.links import (
    find_results,
    find_version,
    is_linked,
    link_part,
    link_result,
    named_versions,
    read_version_file,
    versions_of,
)
from snakechat.workflow.manifest import read_manifest
from support.stored_results import make_result

OUTPUT = Path("output")


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The store of a build in the working directory."""
    (tmp_path / "tree").mkdir()
    monkeypatch.chdir(tmp_path / "tree")
    return OUTPUT / "store"


@pytest.mark.parametrize("path", ["output/data/tiny", "output/sft/tiny"])
def test_the_path_of_a_result_leads_to_a_version(store, path):
    first, second = (make_result(store, epochs=number) for number in (1, 2))
    for folder in (first, second, first):
        assert not is_linked(path, folder)
        link_result(path, folder)
        assert is_linked(path, folder)
        assert Path(path, "adapter/config").samefile(folder / "adapter/config")
        assert Path(f"{path}.manifest.json").samefile(folder / "manifest.json")
        assert find_results(OUTPUT)[Path(path)] == folder.resolve()
    assert sorted(os.listdir(Path(path).parent)) == ["tiny", "tiny.manifest.json"]
    for written in (path, f"./{path}"):
        assert set(versions_of(Path(written))) == {first.resolve(), second.resolve()}
    assert versions_of(Path(".")) == []
    assert named_versions(OUTPUT) == {each.resolve(): [path] for each in (first, second)}
    shutil.rmtree(second)
    assert named_versions(OUTPUT) == {first.resolve(): [path]}
    # The links are relative.
    OUTPUT.rename("elsewhere")
    assert Path("elsewhere", *Path(path).parts[1:], "model").read_text() == "weights"


@pytest.mark.parametrize("path", ["output/sft/tiny", "output/sft/tiny.manifest.json"])
def test_what_cannot_be_linked_is_an_error(store, path):
    result = make_result(store)
    Path(path).mkdir(parents=True)
    with pytest.raises(InputError, match=f"{path}: expected a link to a result in the store"):
        link_result("output/sft/tiny", result)
    shutil.rmtree(result)
    with pytest.raises(InputError, match="was removed since this build was planned"):
        link_result("output/data/toy", result)


@pytest.mark.parametrize("folder", ["", "data", "versions", "store/train_sft"])
def test_a_folder_of_output_may_be_a_link_to_another_disk(store, tmp_path, folder):
    disk = tmp_path / "disk/deep/er"
    disk.mkdir(parents=True)
    place = OUTPUT / folder
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(disk, target_is_directory=True)
    result = make_result(store)
    link_result("output/data/toy", result)
    assert is_linked("output/data/toy", result)
    assert Path("output/data/toy/model").read_text() == "weights"
    assert Path("output/data/toy.manifest.json").exists()
    assert find_results(OUTPUT) == {Path("output/data/toy"): result.resolve()}


def test_what_belongs_to_a_name_stays_with_each_of_its_versions(store):
    first, second = (make_result(store, epochs=number) for number in (1, 2))
    card = Path("output/sft/tiny/README.md")
    link_result("output/sft/tiny", first)
    card.write_text("by hand")
    link_result("output/sft/other", first)
    link_result("output/sft/tiny", second)
    assert not card.exists()
    link_result("output/sft/tiny", first)
    assert card.read_text() == "by hand"
    assert not Path("output/sft/other/README.md").exists() and not (first / "README.md").exists()


def test_the_links_of_another_evaluation_are_replaced_and_no_others(store):
    model = make_result(store)
    evaluation = Path("output/sft/tiny/evaluation")
    link_result("output/sft/tiny", model)
    for name in ("old.json", "metrics.json"):
        other = make_result(store, {name: "{}"}, "evaluate_sft", name=name)
        link_part("output/sft/tiny", model, "evaluation", other)
        if name == "old.json":
            (evaluation / "mine").symlink_to("/etc/hostname")
    assert {path.name for path in evaluation.iterdir()} == {"manifest.json", "metrics.json", "mine"}


def test_a_result_that_moved_to_another_store_is_linked_again(store, tmp_path):
    result = make_result(store)
    link_result("output/sft/tiny", result)
    shared = shutil.copytree(result, tmp_path / "shared/train_sft" / result.name)
    assert not is_linked("output/sft/tiny", shared)
    link_result("output/sft/tiny", shared)
    shutil.rmtree(store)
    assert Path("output/sft/tiny/model").read_text() == "weights"


# --- versions of recipes -------------------------------------------------------------------------


def add_training(store, weights):
    """Store a training of the recipe `mine`; return its folder."""
    folder = make_result(store, {"model": weights}, weights=weights)
    link_result("output/sft/mine", folder)
    return folder


def add_evaluation(store, training, metrics):
    """Store an evaluation of a training; return its folder."""
    inputs = {"model": read_manifest(training / "manifest.json")}
    folder = make_result(store, {"metrics.json": metrics}, "evaluate_sft", inputs, made=metrics)
    link_result("output/eval/sft/mine", folder)
    return folder


def test_a_version_is_a_training_and_the_newest_evaluation_of_it(store):
    first, second = (add_training(store, weights) for weights in ("first", "second"))
    old, new = (add_evaluation(store, first, metrics) for metrics in "12")
    add_evaluation(store, second, "3")
    os.utime(old, (0, 0))
    version = find_version("sft", f"mine@{first.name[:8]}")
    assert version == {"training": first.resolve(), "evaluation": new.resolve()}
    assert read_version_file(new, "metrics.json") == "2"
    (new / "metrics.json").write_text("4")
    with pytest.raises(InputError, match="is damaged or was removed"):
        read_version_file(new, "metrics.json")


def test_versions_that_are_not_there_are_an_error_that_names_the_list(store):
    names = [add_training(store, str(number)).name for number in range(17)]
    # Two of 17 keys start with the same digit.
    [(digit, _)] = Counter(name[0] for name in names).most_common(1)
    listing = "python scripts/store.py list output/sft/mine"
    none = f"output/sft/mine has 0 versions with this key: {listing}"
    for name, message in {
        "mine@xyz": none,
        "mine@": none,
        f"mine@{digit}": f"output/sft/mine has [2-9] versions with this key: {listing}",
        f"mine@{names[0]}": "was not evaluated",
    }.items():
        with pytest.raises(InputError, match=message):
            find_version("sft", name)
