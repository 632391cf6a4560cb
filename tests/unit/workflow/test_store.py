"""The store: locks, results, damage, and the limit of space."""

import errno
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import ROOT
from snakechat.workflow import store as store_module
from snakechat.workflow.errors import InputError
from snakechat.workflow.links import find_results, link_result, paths_by_key, register_root
from snakechat.workflow.manifest import read_sealed, sealed_json
from snakechat.workflow.store import (
    AlreadyLocked,
    acquire_lock,
    complete_result,
    parse_size,
    publish,
    result_damage,
    stored_folders,
    warn_of_size,
    work_path,
)
from store import collect, remove
from support.specs import EMPTY_SPEC
from support.stored_results import make_result

DAY = 24 * 3600


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The store of a build in the working directory."""
    monkeypatch.chdir(tmp_path)
    return Path("output/store")


# --- locks ------------------------------------------------------------------------------------

HOLD = """
import os, sys
from pathlib import Path
from snakechat.workflow.store import acquire_lock

acquire_lock(Path(sys.argv[1]))
# Not by subprocess, which closes file descriptors in any case.
os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", "echo $$; exec sleep 60")
sys.stdin.read()
"""


def test_a_held_lock_names_its_holder_and_ends_with_it(tmp_path):
    """Children of the holder do not keep it."""
    path = tmp_path / "lock"
    path.write_text("process 12345678901234567890 on a host of a long name\n" * 9)
    options = {"stdin": -1, "stdout": -1, "text": True, "cwd": ROOT / "scripts"}
    process = subprocess.Popen([sys.executable, "-c", HOLD, path], **options)
    child = int(process.stdout.readline())
    name = f"process {process.pid} on {platform.node()}"
    try:
        for _ in range(2):
            with pytest.raises(AlreadyLocked, match=f"^{name}$"):
                acquire_lock(path)
        # The failed attempt does not change the name in the file.
        assert path.read_text() == f"{name}\n"
        process.kill()
        process.wait()
        acquire_lock(path)
        assert str(os.getpid()) in path.read_text()
    finally:
        process.kill()
        # It has been running until here.
        os.kill(child, 9)


def test_on_a_file_system_without_locks_a_warning_is_printed(tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    number = errno.ENOLCK
    acquire_lock(tmp_path / "lock")
    assert "this file system has no locks: do not start the same" in capsys.readouterr().err
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        acquire_lock(tmp_path / "lock")


# --- publishing and damage --------------------------------------------------------------------


def put_a_link(path):
    # The text of the link is as long as the model.
    path.rename(path.parent.with_name("link"))
    path.symlink_to("../link")


def change_manifest(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(sealed_json(read_sealed(path) | changes))


def list_a_file_outside(folder):
    files = read_sealed(folder / "manifest.json")["files"]
    shutil.copy(folder / "model", folder.parent / "model")
    change_manifest(folder, files={**files, "../model": files["model"]})


SPEC = EMPTY_SPEC | {"rule": "train_sft", "settings": {"epochs": 2}}
DAMAGES = {
    "edited in place": lambda folder: (folder / "model").write_text("WEIGHTS"),
    "longer": lambda folder: (folder / "model").write_text("weights!"),
    "a missing file": lambda folder: (folder / "adapter/config").unlink(),
    "another file": lambda folder: (folder / "adapter/more").touch(),
    "a truncated manifest": lambda folder: os.truncate(folder / "manifest.json", 50),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "another spec": lambda folder: change_manifest(folder, spec=SPEC),
    "a link": lambda folder: put_a_link(folder / "model"),
    "a linked manifest": lambda folder: put_a_link(folder / "manifest.json"),
    "a linked folder": lambda folder: put_a_link(folder / "adapter"),
    "a path that leads outside": list_a_file_outside,
}
UNREAD = ("edited in place", "another file", "a link", "a linked manifest", "a linked folder")
UNREAD += ("a path that leads outside",)


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_noticed(store, name):
    folder = make_result(store)
    # The record of a run differs from run to run.
    (folder / "run.json").write_text("{}")
    assert not result_damage(folder) and complete_result(folder)
    shutil.copytree(folder, work_path(folder, "result"))
    DAMAGES[name](folder)
    assert result_damage(folder)
    # Planning reads no file.
    assert bool(complete_result(folder)) == (name in UNREAD)
    assert set(find_results(Path("output"))) == set(find_results(store)) == {folder}
    publish(folder)
    assert not result_damage(folder) and stored_folders(store) == [folder]


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
    collect(store, paths_by_key(store, Path("output")), time.time(), 0)
    return stored_folders(store)


def test_what_any_root_leads_to_stays(store, aged, tmp_path, monkeypatch):
    store = store.absolute()
    link_result("output/sft/tiny", aged[2])
    link_result("output/sft/tiny", aged[1])
    register(store)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    link_result("output/sft/mine", tmp_path / aged[0])
    register(store)
    needed = sorted(tmp_path / folder for folder in aged[:2])
    # Also in a folder without output/.
    for folder in (tmp_path / "other", store):
        monkeypatch.chdir(folder)
        assert collect_unneeded(store) == needed
    # What an output folder that cannot be read needs is unknown.
    (tmp_path / "other").rename(tmp_path / "gone")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with pytest.raises(InputError, match="other/output, which uses this store, does not exist"):
            collect_unneeded(store)
        # Its disk is not mounted.
        (tmp_path / "other/output").mkdir(parents=True, exist_ok=True)


def test_a_root_with_other_bytes_after_a_power_cut_is_registered_again(store, aged):
    register(store)
    for path in (Path("output/.identity"), *store.glob("roots/*")):
        path.write_bytes(b"\xff")
    link_result("output/sft/tiny", aged[0])
    register(store)
    assert collect_unneeded(store) == [aged[0]]


def test_a_folder_of_another_machine_at_the_same_path_is_unknown(store, aged, monkeypatch):
    shared = store.rename("shared")
    for machine, result in zip("ab", aged, strict=False):
        monkeypatch.setattr("platform.node", lambda machine=machine: machine)
        register(shared)
        link_result("output/sft/tiny", shared / result.relative_to(store))
        if machine == "a":
            collect_unneeded(shared)
            shutil.copytree(shared / result.relative_to(store), shared / aged[1].relative_to(store))
            Path("output").rename("disk of a")
    with pytest.raises(InputError, match="output, which uses this store, does not exist on this"):
        collect_unneeded(shared)
    # A folder that is made again on its own machine takes the place of the earlier one.
    shutil.rmtree("output")
    register(shared)
    assert len(list((shared / "roots").iterdir())) == 2


def test_a_store_that_was_moved_keeps_what_is_linked(store, aged, tmp_path):
    link_result("output/sft/tiny", aged[0])
    register(store)
    shared = store.rename(tmp_path / "shared")
    [root] = (shared / "roots").iterdir()
    # It named the folder above the store.
    with pytest.raises(InputError, match="does not exist"):
        collect_unneeded(shared)
    root.unlink()
    assert [folder.name for folder in collect_unneeded(shared)] == [aged[0].name]


def test_what_is_linked_while_links_are_read_or_in_a_store_below_output_stays(store, aged):
    other = store.rename("output/mine")
    first, second, _ = (other / folder.relative_to(store) for folder in aged)
    link_result("output/sft/tiny", first)
    # The times of files are a few milliseconds behind.
    started, needed = time.time() - 1, paths_by_key(other, Path("output"))
    link_result("output/sft/other", second)
    collect(other, needed, started, 0)
    assert stored_folders(other) == sorted([first, second])


def resolve_links(tree):
    """Replace a tree by what `cp -rL` makes of it."""
    shutil.copytree(tree, "copy")
    shutil.rmtree(tree) if not tree.is_symlink() else tree.unlink()
    Path("copy").rename(tree)


def copy_a_folder_alone(tree):
    resolve_links(tree / "sft/tiny")
    (tree / "sft/tiny.manifest.json").unlink()


@pytest.mark.parametrize("change", [resolve_links, copy_a_folder_alone])
def test_copies_in_place_of_links_name_what_stays(store, aged, change):
    register(store)
    link_result("output/sft/tiny", aged[0])
    change(Path("output"))
    assert collect_unneeded(store) == [aged[0]]


@pytest.mark.parametrize("path", ["output/best.bin", "output/mine/best", "output/sft/tiny/mine"])
def test_a_result_stays_whose_parts_links_of_the_user_lead_to(store, aged, path):
    link_result("output/sft/tiny", aged[0])
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).symlink_to((aged[1] / ("model" if path.endswith("bin") else "adapter")).absolute())
    assert collect_unneeded(store) == sorted(aged[:2])


def lose_a_disk(folder):
    folder.rename("elsewhere")
    folder.symlink_to(Path("disk").absolute())


def damage_a_copy(tree):
    resolve_links(tree / "sft/tiny")
    (tree / "sft/tiny/manifest.json").write_text("{")


def lose_links(tree):
    for path in [*tree.glob("sft/*"), *tree.glob("mine/a/b/*")]:
        path.unlink()


def damage_a_root(content):
    """Return a function that leaves a root as a power cut does."""
    return lambda tree: next(tree.glob("store/roots/*")).write_bytes(content)


UNKNOWN = {
    "output/sft leads nowhere": lambda tree: lose_a_disk(tree / "sft"),
    "output/mine/a/b leads nowhere": lambda tree: lose_a_disk(tree / "mine/a/b"),
    "output/sft/tiny leads nowhere or is damaged: which result it needs is unknown": damage_a_copy,
    "no path leads to a result in output/store": lose_links,
    "a folder without a name, which .* delete output/store/roots/": damage_a_root(b""),
    "which uses this store.* delete output/store/roots/": damage_a_root(b"\xff\0"),
}


@pytest.mark.parametrize("message", UNKNOWN)
def test_nothing_is_removed_where_what_is_needed_is_unknown(store, aged, message):
    for path, folder in {"sft/tiny": aged[0], "mine/a/b/tiny": aged[1]}.items():
        link_result(f"output/{path}", folder)
    register(store)
    UNKNOWN[message](Path("output"))
    with pytest.raises(InputError, match=message):
        remove(store, 0, interrupted=False)
    assert stored_folders(store) == sorted(aged)


def test_what_another_process_removes_is_not_counted(store, aged, monkeypatch):
    # After the first result was removed.
    monkeypatch.setattr("store.format_time", lambda _: shutil.rmtree(aged[1], ignore_errors=True))
    assert [result.folder for result in collect(store, (), time.time(), 0)] == [aged[2], aged[0]]


def test_space_is_freed_on_a_full_disk(store, aged, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    # A job makes this one.
    descriptor = acquire_lock(work_path(aged[1], "lock"))
    monkeypatch.setattr(Path, "mkdir", fail)
    removed = collect(store, (), time.time(), 0)
    os.close(descriptor)
    assert {result.folder for result in removed} == {aged[0], aged[2]}
    assert stored_folders(store) == [aged[1]]
    assert [path.name for path in store.glob("*/.*")] == [f".{aged[1].name}"]


@pytest.mark.parametrize("interrupted", [True, False])
def test_what_a_job_makes_stays_and_checkpoints_stay_unless_named(store, aged, interrupted):
    held, state, left = (aged[0].with_name(letter * 32) for letter in "abc")
    work_path(left, "result").mkdir(parents=True)
    for folder in (held, state):
        work_path(folder, "state/00000020").mkdir(parents=True)
        work_path(folder, "state/00000020/model").write_text("x" * 1000)
    assert stored_folders(store, is_finished=False) == [held, state, left]
    descriptor = acquire_lock(work_path(held, "lock"))
    removed = {result.folder for result in collect(store, (), time.time(), 0, interrupted)}
    os.close(descriptor)
    assert removed == {*aged, left, *([state] if interrupted else [])}
    assert work_path(held, "state").exists() and not work_path(left).exists()
    assert work_path(state, "state").exists() != interrupted


def test_a_job_that_deletes_a_file_keeps_its_inputs(store, aged, monkeypatch):
    job = aged[0].with_name("a" * 32)
    work_path(job, "state/00000020").mkdir(parents=True)
    work_path(job, "inputs").write_text(f"{aged[1]}\n")
    found = store_module.walk_files
    monkeypatch.setattr(store_module, "walk_files", lambda path: [*found(path), path / "gone"])
    collect(store, (), time.time(), 0)
    assert stored_folders(store) == [aged[1]]


def test_a_store_beyond_its_limit_is_one_line(store, aged, capsys):
    assert (parse_size("0"), parse_size("1.5G"), parse_size("2 TiB")) == (0, 3 << 29, 2 << 40)
    warn_of_size(store, size_of(*aged))
    assert not capsys.readouterr().err
    warn_of_size(store, 100)
    assert "gc --store output/store --max-size 100B" in capsys.readouterr().err
