"""The store: links to results, damage, copies between stores, and the limit of space."""

import errno
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from snakechat.workflow import shared_store
from snakechat.workflow.errors import InputError
from snakechat.workflow.shared_store import put_result, take_result
from snakechat.workflow.store import (
    is_undamaged,
    link_result,
    linked_folder,
    linked_folders,
    publish,
    temporary_folder,
)
from snakechat.workflow.store_space import collect, keep_limit, parse_size, stored_results
from support.stored_results import make_result

DAY = 24 * 3600


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The store of a build in the working directory."""
    monkeypatch.chdir(tmp_path)
    return Path("output/store")


@pytest.fixture
def shared(tmp_path):
    """The folder of a store that builds share."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o775)
    return tmp_path / "shared"


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


# --- publishing and links ---------------------------------------------------------------------


def test_the_path_of_a_result_leads_to_a_version(store):
    first, second = (make_result(store, epochs=number) for number in (1, 2))
    for folder in (first, second, first):
        link_result("output/sft/tiny", folder)
        assert Path("output/sft/tiny").resolve() == folder.resolve()
        assert linked_folder("output/sft/tiny") == folder
        assert Path("output/sft/tiny.manifest.json").samefile(folder / "manifest.json")
        assert linked_folders(Path("output")) == {folder.resolve()}
    assert sorted(os.listdir("output/sft")) == ["tiny", "tiny.manifest.json"]
    # The links are relative.
    Path("output").rename("elsewhere")
    assert Path("elsewhere/sft/tiny.manifest.json").exists()


@pytest.mark.parametrize("path", ["output/sft/tiny", "output/sft/tiny.manifest.json"])
def test_a_folder_in_the_place_of_a_link_is_an_error(store, path):
    Path(path).mkdir(parents=True)
    with pytest.raises(InputError, match=f"{path}: expected a link to a folder in output/store"):
        link_result("output/sft/tiny", make_result(store))


def test_a_result_is_published_in_place_of_a_damaged_one(store):
    folder = make_result(store)
    shutil.copytree(folder, temporary_folder(folder))
    (folder / "model").write_text("damaged")
    assert not is_undamaged(folder)
    publish(folder)
    assert is_undamaged(folder)
    assert os.listdir(folder.parent) == [folder.name]


# --- damage -----------------------------------------------------------------------------------


def put_a_link(folder):
    (folder / "model").rename(folder.parent / "model")
    (folder / "model").symlink_to("../model")


def put_a_linked_folder(folder):
    (folder / "adapter").rename(folder.parent / "adapter")
    (folder / "adapter").symlink_to("../adapter", target_is_directory=True)


def change_manifest(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def list_a_file_outside(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    properties = manifest["files"]["model"]
    shutil.copy(folder / "model", folder.parent / "model")
    change_manifest(folder, files={**manifest["files"], "../model": properties})


DAMAGES = {
    "edited in place": lambda folder: (folder / "model").write_text("WEIGHTS"),
    "longer": lambda folder: (folder / "model").write_text("weights!"),
    "a missing file": lambda folder: (folder / "adapter/config").unlink(),
    "another file": lambda folder: (folder / "adapter/more").touch(),
    "a truncated manifest": lambda folder: os.truncate(folder / "manifest.json", 50),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "other inputs": lambda folder: change_manifest(folder, inputs={"model": "0"}),
    "a link": put_a_link,
    "a linked folder": put_a_linked_folder,
    "a path that leads outside": list_a_file_outside,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_noticed_and_a_shared_result_with_it_is_removed(store, shared, damage, capsys):
    folder = make_result(shared)
    damage(folder)
    assert not is_undamaged(folder)
    target = store / "train_sft/tiny/.taken.tmp"
    assert not take_result(folder, target)
    assert "is damaged and removed" in capsys.readouterr().err
    assert not target.exists() and not folder.exists()


def test_files_of_a_run_are_no_damage(store):
    folder = make_result(store)
    for name in ("README.md", "run.json", ".snakemake_timestamp"):
        (folder / name).write_text("of a run")
    assert is_undamaged(folder)


# --- copies between stores --------------------------------------------------------------------


def exchange(folder, shared):
    """Put a result into a shared store, and take it from there; return both copies."""
    stored, taken = shared / "train_sft/tiny" / folder.name, folder.with_name(".taken.tmp")
    put_result(folder, stored, replace=False)
    assert take_result(stored, taken)
    return stored, taken


def test_a_result_comes_back_as_it_was(store, shared, capsys):
    folder = make_result(store)
    (folder / "run.json").write_text("{}")
    before = contents(folder)
    (folder / "README.md").write_text("a card, which each build writes")
    stored, taken = exchange(folder, shared)
    assert contents(stored) == contents(taken) == before
    # What people edit is copied.
    assert (stored / "model").samefile(folder / "model")
    assert not (stored / "manifest.json").samefile(folder / "manifest.json")
    assert stored.stat().st_mode & 0o777 == stored.parent.stat().st_mode & 0o777 == 0o775
    assert os.listdir(stored.parent) == [folder.name]
    assert not capsys.readouterr().err


def test_a_file_system_without_links_gets_copies(store, shared, monkeypatch):
    def link(source, target, **_):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(shared_store.os, "link", link)
    folder = make_result(store)
    for copied in exchange(folder, shared):
        assert contents(copied) == contents(folder)
        assert (copied / "model").stat().st_nlink == 1


def test_a_result_that_is_there_stays_unless_it_is_replaced(store, shared):
    folder = make_result(store)
    stored, _ = exchange(folder, shared)
    (stored / "mark").touch()
    put_result(folder, stored, replace=False)
    assert (stored / "mark").exists()
    put_result(folder, stored, replace=True)
    assert contents(stored) == contents(folder)


def test_a_shared_store_that_cannot_be_written_costs_a_warning(store, tmp_path, capsys):
    (tmp_path / "file").touch()
    folder = make_result(store)
    put_result(folder, tmp_path / "file/train_sft/tiny" / folder.name, replace=False)
    assert f"warning: {folder} is not stored in {tmp_path}/file" in capsys.readouterr().err
    assert not take_result(tmp_path / "file/train_sft/tiny" / folder.name, folder)
    assert is_undamaged(folder)


# --- space ------------------------------------------------------------------------------------


@pytest.fixture
def aged(store):
    """Three results of 3, 2 and 1 bytes that were last used 1, 2 and 3 days ago."""
    folders = [make_result(store, files={"model": "x" * (3 - day)}, day=day) for day in range(3)]
    for day, folder in enumerate(folders, 1):
        os.utime(folder, (time.time() - day * DAY,) * 2)
    return folders


@pytest.mark.parametrize(("max_bytes", "kept"), [(6, 3), (5, 2), (4, 1), (0, 0)])
def test_the_least_recently_used_results_are_removed(store, aged, max_bytes, kept):
    removed = collect(store, (), max_bytes)
    assert [result.folder for result in removed] == aged[kept:][::-1]
    assert [result.folder for result in stored_results(store)] == aged[:kept][::-1]


def test_what_a_path_leads_to_stays_and_does_not_count(store, aged):
    link_result("output/sft/tiny", aged[2])
    assert collect(store, linked_folders(Path("output")), 5) == []
    collect(store, linked_folders(Path("output")), 0)
    assert [result.folder for result in stored_results(store)] == [aged[2]]


def test_leftovers_are_removed_after_a_day(store, aged):
    leftovers = [aged[0].with_name(name) for name in (".young.tmp", ".old.tmp")]
    for leftover in leftovers:
        leftover.mkdir()
    os.utime(leftovers[1], (time.time() - 2 * DAY,) * 2)
    collect(store, (), 6)
    assert [leftover.exists() for leftover in leftovers] == [True, False]


def test_the_limit_is_kept_at_most_every_ten_minutes(store, aged):
    keep_limit(store, set, None)
    assert len(stored_results(store)) == 3
    young = make_result(store, "young")
    keep_limit(store, set, 3)
    # Another job may be about to link the young one.
    assert [result.folder for result in stored_results(store)] == [aged[0], young]
    keep_limit(store, set, 0)
    assert len(stored_results(store)) == 2


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("1.5G", 3 << 29), ("2 TiB", 2 << 40)])
def test_sizes(text, size):
    assert parse_size(text) == size
