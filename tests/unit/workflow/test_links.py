"""Names: links to results, wherever folders of output/ are, whatever names are."""

import os
import shutil
from pathlib import Path

import pytest

from snakechat.workflow.errors import InputError
from snakechat.workflow.links import (
    is_linked,
    link_part,
    link_result,
    linked_folder,
    linked_results,
    named_versions,
    versions_of,
)
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
        assert linked_folder(path) == folder.resolve()
        assert Path(path, "adapter/config").samefile(folder / "adapter/config")
        assert Path(f"{path}.manifest.json").samefile(folder / "manifest.json")
        assert dict(linked_results(OUTPUT)) == {Path(path): folder.resolve()}
    assert sorted(os.listdir(Path(path).parent)) == ["tiny", "tiny.manifest.json"]
    assert set(versions_of(path)) == {first.resolve(), second.resolve()}
    assert named_versions(OUTPUT) == {each.resolve(): [path] for each in (first, second)}
    # The links are relative.
    OUTPUT.rename("elsewhere")
    assert Path("elsewhere", *Path(path).parts[1:], "model").read_text() == "weights"


@pytest.mark.parametrize("path", ["output/sft/tiny", "output/sft/tiny.manifest.json"])
def test_a_folder_in_the_place_of_a_link_is_an_error(store, path):
    Path(path).mkdir(parents=True)
    with pytest.raises(InputError, match=f"{path}: expected a link to a result in the store"):
        link_result("output/sft/tiny", make_result(store))


NAMES = ("x.tmp", "0" * 32, ".".join("ab"), "store", "versions", "manifest", "x.link", "n" * 200)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("folder", ["data", "sft"])
def test_any_name_leads_to_its_result(store, name, folder):
    paths = [f"output/{folder}/{each}" for each in (name, f"{name}2")]
    results = [make_result(store, name=path) for path in paths]
    for path, result in zip(paths, results, strict=True):
        link_result(path, result)
    for path, result in zip(paths, results, strict=True):
        assert linked_folder(path) == result.resolve() and versions_of(path) == [result.resolve()]
    assert set(dict(linked_results(OUTPUT)).values()) == {each.resolve() for each in results}
    assert len(named_versions(OUTPUT)) == 2


@pytest.mark.parametrize("folder", ["", "data", "store", "versions", "store/train_sft"])
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
    assert dict(linked_results(OUTPUT)) == {Path("output/data/toy"): result.resolve()}


def test_what_belongs_to_a_name_stays_with_each_of_its_versions(store):
    first, second = (make_result(store, epochs=number) for number in (1, 2))
    link_result("output/sft/tiny", first)
    Path("output/sft/tiny/README.md").write_text("by hand")
    link_result("output/sft/other", first)
    link_result("output/sft/tiny", second)
    assert not Path("output/sft/tiny/README.md").exists()
    link_result("output/sft/tiny", first)
    assert Path("output/sft/tiny/README.md").read_text() == "by hand"
    assert not Path("output/sft/other/README.md").exists()
    assert not (first / "README.md").exists()


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
    shared = tmp_path / "shared/train_sft" / result.name
    shutil.copytree(result, shared)
    assert not is_linked("output/sft/tiny", shared)
    link_result("output/sft/tiny", shared)
    shutil.rmtree(store)
    assert Path("output/sft/tiny/model").read_text() == "weights"


def test_a_result_that_was_removed_since_it_was_found_is_an_error(store):
    result = make_result(store)
    shutil.rmtree(result)
    with pytest.raises(InputError, match="was removed since this build was planned"):
        link_result("output/data/toy", result)
