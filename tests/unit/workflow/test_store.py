"""The store: results, damage, and the limit of space."""

import errno
import os
import shutil
import time
from pathlib import Path

import pytest

from snakechat.workflow.digests import read_sealed, sealed_json
from snakechat.workflow.errors import InputError
from snakechat.workflow.links import link_result, register_root
from snakechat.workflow.locks import acquire_lock
from snakechat.workflow.manifest import lock_path, state_folder, unfinished_folder
from snakechat.workflow.store import (
    complete_result,
    find_results,
    parse_size,
    publish,
    result_damage,
    stored_folders,
    warn_of_size,
)
from store import collect, needed_keys
from support.specs import EMPTY_SPEC
from support.stored_results import make_result

DAY = 24 * 3600


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The store of a build in the working directory."""
    monkeypatch.chdir(tmp_path)
    return Path("output/store")


# --- publishing and damage --------------------------------------------------------------------


def test_a_result_is_published_in_place_of_a_damaged_one(store):
    folder = make_result(store)
    shutil.copytree(folder, unfinished_folder(folder))
    (folder / "model").write_text("damaged")
    assert result_damage(folder)
    publish(folder)
    assert not result_damage(folder) and complete_result(folder)
    assert stored_folders(store) == [folder]


def put_a_link(folder, name="model"):
    # The text of the link is as long as the model.
    (folder / name).rename(folder.parent / "link")
    (folder / name).symlink_to("../link")


def put_a_linked_folder(folder):
    (folder / "adapter").rename(folder.parent / "adapter")
    (folder / "adapter").symlink_to("../adapter", target_is_directory=True)


def change_manifest(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(sealed_json(read_sealed(path) | changes))


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[content.index(b"facts")] ^= 1
    path.write_bytes(content)


def list_a_file_outside(folder):
    manifest = read_sealed(folder / "manifest.json")
    properties = manifest["files"]["model"]
    shutil.copy(folder / "model", folder.parent / "model")
    change_manifest(folder, files={**manifest["files"], "../model": properties})


SPEC = EMPTY_SPEC | {"rule": "train_sft", "settings": {"epochs": 2}}
DAMAGES = {
    "edited in place": lambda folder: (folder / "model").write_text("WEIGHTS"),
    "longer": lambda folder: (folder / "model").write_text("weights!"),
    "a missing file": lambda folder: (folder / "adapter/config").unlink(),
    "another file": lambda folder: (folder / "adapter/more").touch(),
    "a truncated manifest": lambda folder: os.truncate(folder / "manifest.json", 50),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "an edited manifest": lambda folder: flip_a_bit(folder / "manifest.json"),
    "another spec": lambda folder: change_manifest(folder, spec=SPEC),
    "a link": put_a_link,
    "a linked manifest": lambda folder: put_a_link(folder, "manifest.json"),
    "a linked folder": put_a_linked_folder,
    "a path that leads outside": list_a_file_outside,
}
UNREAD = ("edited in place", "another file", "a link", "a linked folder")


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_noticed(store, name):
    folder = make_result(store)
    assert not result_damage(folder) and complete_result(folder)
    DAMAGES[name](folder)
    assert result_damage(folder)
    # Planning reads no file.
    assert bool(complete_result(folder)) == (name in UNREAD)
    assert find_results(Path("output")) == find_results(store) == [folder]


def test_the_record_of_a_run_is_no_damage(store):
    folder = make_result(store)
    (folder / "run.json").write_text("{}")
    assert not result_damage(folder)


# --- space ------------------------------------------------------------------------------------


@pytest.fixture
def aged(store):
    """Three results that were last used 1, 2 and 3 days ago."""
    folders = [make_result(store, {"model": "x"}, day=day) for day in range(3)]
    for day, folder in enumerate(folders, 1):
        os.utime(folder, (time.time() - day * DAY,) * 2)
    return folders


def size_of(*folders):
    return sum(path.stat().st_size for folder in folders for path in folder.iterdir())


@pytest.mark.parametrize("number", [3, 1, 0])
def test_the_least_recently_used_results_are_removed(store, aged, number):
    removed = collect(store, (), time.time(), size_of(*aged[:number]))
    assert [result.folder for result in removed] == aged[number:][::-1]
    assert stored_folders(store) == sorted(aged[:number])
    assert not list(store.glob("*/.*"))


def register(store):
    """Register output/ in a store as a build does."""
    Path("output").mkdir(exist_ok=True)
    register_root(store, Path("output"))


def collect_unneeded(store):
    return collect(store, needed_keys(store, Path("output")), time.time(), 0)


def test_what_any_root_leads_to_stays(store, aged, tmp_path, monkeypatch):
    store = store.absolute()
    link_result("output/sft/tiny", aged[2])
    link_result("output/sft/tiny", aged[1])
    register(store)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    link_result("output/sft/mine", tmp_path / aged[0])
    register(store)
    collect_unneeded(store)
    assert stored_folders(store) == sorted(tmp_path / folder for folder in aged[:2])
    # What an output folder that cannot be read needs is unknown.
    (tmp_path / "other").rename(tmp_path / "gone")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with pytest.raises(InputError, match="other/output, which uses this store, does not exist"):
            collect_unneeded(store)
        # Its disk is not mounted.
        (tmp_path / "other/output").mkdir(parents=True, exist_ok=True)


def test_what_a_build_links_while_links_are_read_stays(store, aged):
    link_result("output/sft/tiny", aged[0])
    # The times of files are a few milliseconds behind.
    started, needed = time.time() - 1, needed_keys(store, Path("output"))
    link_result("output/sft/other", aged[1])
    collect(store, needed, started, 0)
    assert stored_folders(store) == sorted(aged[:2])


def test_a_folder_of_another_machine_at_the_same_path_is_unknown(store, aged, monkeypatch):
    shared = store.rename("shared")
    results = [shared / folder.relative_to(store) for folder in aged]
    for machine, result in zip("ab", results, strict=False):
        monkeypatch.setattr("platform.node", lambda machine=machine: machine)
        register(shared)
        link_result("output/sft/tiny", result)
        if machine == "a":
            collect_unneeded(shared)
            shutil.copytree(results[0], results[1])
            Path("output").rename("disk of a")
    with pytest.raises(InputError, match="output, which uses this store, does not exist on this"):
        collect_unneeded(shared)
    # A folder that is made again on its own machine takes the place of the earlier one.
    shutil.rmtree("output")
    register(shared)
    assert len(list((shared / "roots").iterdir())) == 2


@pytest.mark.parametrize("folder", ["output/sft", "output/mine/a/b"])
def test_what_a_folder_on_a_disk_that_is_not_mounted_needs_is_unknown(store, aged, folder):
    link_result(f"{folder}/tiny", aged[0])
    register(store)
    disk = Path("disk").absolute()
    Path(folder).rename(disk)
    Path(folder).symlink_to(disk)
    disk.rename("elsewhere")
    with pytest.raises(InputError, match=f"{folder} leads nowhere: mount its disk"):
        collect_unneeded(store)
    assert stored_folders(store) == sorted(aged)


def test_a_store_that_was_moved_keeps_what_is_linked(store, aged, tmp_path):
    link_result("output/sft/tiny", aged[0])
    register(store)
    shared = store.rename(tmp_path / "shared")
    [root] = (shared / "roots").iterdir()
    # It named the folder above the store.
    with pytest.raises(InputError, match="does not exist"):
        collect_unneeded(shared)
    root.unlink()
    assert len(collect_unneeded(shared)) == 2
    assert [folder.name for folder in stored_folders(shared)] == [aged[0].name]


def resolve_links(tree):
    """Replace a tree by what `cp -rL` makes of it."""
    shutil.copytree(tree, "copy")
    shutil.rmtree(tree) if not tree.is_symlink() else tree.unlink()
    Path("copy").rename(tree)


def copy_a_folder_alone(tree):
    resolve_links(tree / "sft/tiny")
    (tree / "sft/tiny.manifest.json").unlink()


def move_a_copy_to_another_disk(tree):
    copy_a_folder_alone(tree)
    (tree / "sft/tiny").rename("disk")
    (tree / "sft/tiny").symlink_to(Path("disk").absolute())


def lose_links_to_folders(tree):
    resolve_links(tree)
    shutil.rmtree(tree / "sft/tiny")


COPIES = (resolve_links, copy_a_folder_alone, move_a_copy_to_another_disk, lose_links_to_folders)


@pytest.mark.parametrize("change", COPIES)
def test_copies_in_place_of_links_name_what_stays(store, aged, change):
    register(store)
    link_result("output/sft/tiny", aged[0])
    change(Path("output"))
    collect_unneeded(store)
    assert stored_folders(store) == [aged[0]]


@pytest.mark.parametrize("path", ["output/best.bin", "output/mine/best", "output/sft/tiny/mine"])
def test_a_result_stays_whose_parts_links_of_the_user_lead_to(store, aged, path):
    link_result("output/sft/tiny", aged[0])
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).symlink_to((aged[1] / ("model" if path.endswith("bin") else "adapter")).absolute())
    collect_unneeded(store)
    assert stored_folders(store) == sorted(aged[:2])


def test_what_a_damaged_copy_needs_is_unknown(store, aged):
    link_result("output/data/toy", aged[0])
    link_result("output/sft/tiny", aged[1])
    resolve_links(Path("output/sft/tiny"))
    Path("output/sft/tiny/manifest.json").write_text("{")
    with pytest.raises(InputError, match=r"output/sft/tiny/manifest\.json is damaged: which"):
        collect_unneeded(store)


def test_a_store_that_no_path_leads_to_is_not_emptied(store, aged):
    register(store)
    link_result("output/sft/tiny", aged[0])
    for path in Path("output/sft").iterdir():
        path.unlink()
    with pytest.raises(InputError, match="no path leads to a result in output/store"):
        collect_unneeded(store)


def test_results_of_a_store_elsewhere_in_output_are_no_copies(store, aged):
    other = store.rename("output/mine")
    link_result("output/sft/tiny", other / aged[0].relative_to(store))
    collect_unneeded(other)
    assert [folder.name for folder in stored_folders(other)] == [aged[0].name]


def test_space_is_freed_on_a_full_disk(store, aged, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    # A job makes this one.
    descriptor = acquire_lock(lock_path(aged[1]))
    monkeypatch.setattr(Path, "mkdir", fail)
    monkeypatch.setattr(os, "write", fail)
    removed = collect(store, (), time.time(), 0)
    os.close(descriptor)
    assert {result.folder for result in removed} == {aged[0], aged[2]}
    assert stored_folders(store) == [aged[1]]
    assert [path.name for path in store.glob("*/.*")] == [f".{aged[1].name}"]


def test_a_root_without_a_name_keeps_everything(store, aged):
    register_root(store.absolute(), Path("output"))
    [root] = (store / "roots").iterdir()
    # As a power cut leaves it.
    for content in (b"", b"\xff\0"):
        root.write_bytes(content)
        with pytest.raises(InputError, match=f"delete .*{root.name} too"):
            collect_unneeded(store)


@pytest.mark.parametrize("interrupted", [True, False])
def test_what_a_job_makes_stays_and_checkpoints_stay_unless_named(store, aged, interrupted):
    left = unfinished_folder(aged[0].with_name("c" * 32))
    left.mkdir(parents=True)
    states = [state_folder(aged[0].with_name(letter * 32)) for letter in "ab"]
    for state in states:
        (state / "00000020").mkdir(parents=True)
        (state / "00000020/model").write_text("x" * 1000)
    descriptor = acquire_lock(lock_path(states[0].parent.with_name("a" * 32)))
    removed = {result.folder.name[0] for result in collect(store, (), time.time(), 0, interrupted)}
    os.close(descriptor)
    assert removed >= {"c"} and ("b" in removed) == interrupted
    assert states[0].exists() and states[1].exists() != interrupted and not left.parent.exists()


def test_a_store_beyond_its_limit_is_one_line(store, aged, capsys):
    assert (parse_size("0"), parse_size("1.5G"), parse_size("2 TiB")) == (0, 3 << 29, 2 << 40)
    warn_of_size(store, size_of(*aged))
    assert not capsys.readouterr().err
    warn_of_size(store, 100)
    assert "gc --store output/store --max-size 100B" in capsys.readouterr().err
    assert len(stored_folders(store)) == 3
