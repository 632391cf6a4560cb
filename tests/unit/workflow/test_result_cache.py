"""The cache of results: round trips, damage, full and foreign folders, concurrency, removal."""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from conftest import ROOT
from snakechat.workflow import file_links, result_cache
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import result_key
from snakechat.workflow.result_cache import ResultCache, parse_size
from support.cached_results import make_result, write_manifest

HOUR, DAY = 3600, 24 * 3600


@pytest.fixture
def cache(tmp_path):
    return ResultCache(tmp_path / "cache", None)


@pytest.fixture
def result(tmp_path):
    """The folder of a result, outside the cache."""
    return tmp_path / "output/sft/tiny"


@pytest.fixture
def stored(cache, result):
    """The key of the result, which the cache has."""
    key = make_result(result)
    cache.put(key, result)
    return key


@pytest.fixture
def target(tmp_path):
    return tmp_path / "taken"


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def entry_folder(cache, key):
    return cache.folder / key[:2] / key / "result"


def is_empty(cache):
    """Return whether a cache has neither entries nor leftovers."""
    return not cache.entries() and not list((cache.folder / "tmp").iterdir())


# --- round trips ------------------------------------------------------------------------------


def test_a_result_comes_back_as_it_was(cache, result, stored, target, capsys):
    before = contents(result)
    shutil.rmtree(result)
    assert cache.take(stored, target)
    assert contents(target) == before
    assert before.keys() == {"model", "adapter/config", "manifest.json"}
    assert not capsys.readouterr().err
    assert list((cache.folder / "tmp").iterdir()) == []


def test_files_are_stored_once_on_a_file_system_with_links(cache, result, stored, target):
    cache.take(stored, target)
    entry = entry_folder(cache, stored)
    assert (target / "model").samefile(result / "model")
    assert (target / "model").samefile(entry / "model")
    # What people edit.
    assert not (target / "manifest.json").samefile(entry / "manifest.json")


def test_a_file_system_without_links_gets_copies(cache, result, target, monkeypatch):
    def link(source, target, **_):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    key = make_result(result)
    monkeypatch.setattr(file_links.os, "link", link)
    cache.put(key, result)
    assert cache.take(key, target)
    assert contents(target) == contents(result)
    assert (result / "model").stat().st_nlink == (target / "model").stat().st_nlink == 1


def test_files_that_a_manifest_does_not_list_are_not_stored(cache, result):
    key = make_result(result)
    (result / ".snakemake_timestamp").touch()
    cache.put(key, result)
    assert contents(entry_folder(cache, key)).keys() == {"model", "adapter/config", "manifest.json"}


def test_a_second_put_changes_nothing(cache, result, stored):
    def states():
        # Without the time of access.
        statuses = {path: path.lstat() for path in cache.folder.rglob("*")}
        return {path: (each.st_ino, each.st_mtime_ns) for path, each in statuses.items()}

    before = states()
    cache.put(stored, result)
    assert states() == before


def test_an_unknown_key_is_not_taken(cache, stored, target):
    assert not cache.take("0" * 64, target)
    assert not ResultCache(cache.folder / "missing", None).take(stored, target)
    assert not target.exists()


def test_an_existing_target_is_an_error(cache, result, stored):
    before = contents(result)
    with pytest.raises(FileExistsError):
        cache.take(stored, result)
    assert contents(result) == before


def test_an_entry_says_what_it_is_and_where_it_was_made(cache, stored):
    [entry] = cache.entries()
    assert (entry.key, entry.folder) == (stored, entry_folder(cache, stored))
    assert (entry.rule, entry.name, entry.path) == ("train_sft", "tiny", "output/sft/tiny")
    assert entry.num_bytes == len("weights{}")
    assert entry.host == os.uname().nodename
    assert entry.created.startswith("20") and entry.created.endswith("+00:00")


def test_files_of_the_run_come_back_in_place_of_those_of_another(cache, result, target, tmp_path):
    def run_files(folder):
        return {"run.json": folder / "tiny.run.json", "logs": folder / "logs/sft/tiny"}

    key = make_result(result)
    (tmp_path / "logs/sft/tiny/deep").mkdir(parents=True)
    (tmp_path / "logs/sft/tiny/deep/events").write_text("first")
    (tmp_path / "tiny.run.json").write_text("{}")
    cache.put(key, result, run_files(tmp_path))
    (tmp_path / "logs/sft/tiny/deep/events").write_text("second")
    (tmp_path / "logs/sft/tiny/more").touch()
    assert cache.take(key, target, run_files(tmp_path))
    assert contents(tmp_path / "logs") == {"sft/tiny/deep/events": b"first"}
    # In another clone.
    assert cache.take(key, target.with_name("again"), run_files(tmp_path / "clone"))
    assert (tmp_path / "clone/tiny.run.json").read_text() == "{}"
    assert contents(tmp_path / "clone/logs") == contents(tmp_path / "logs")


def test_files_of_another_run_do_not_stay_with_a_result(cache, stored, target, tmp_path):
    (tmp_path / "tiny.run.json").write_text("{}")
    assert cache.take(stored, target, {"run.json": tmp_path / "tiny.run.json"})
    assert not (tmp_path / "tiny.run.json").exists()


def test_links_among_the_files_of_a_run_are_not_followed(cache, result, target, tmp_path, capsys):
    key = make_result(result)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/events").touch()
    (tmp_path / "tiny.run.json").write_text("{}")
    (tmp_path / "secret").write_text("mine")
    run_files = {"run.json": tmp_path / "tiny.run.json", "logs": tmp_path / "logs"}
    cache.put(key, result, run_files)
    stored = entry_folder(cache, key).parent / "run"
    (stored / "run.json").unlink()
    (stored / "run.json").symlink_to(tmp_path / "secret")
    (stored / "logs/secret").symlink_to(tmp_path / "secret")
    assert cache.take(key, target, run_files)
    assert "run/run.json is not restored: " in capsys.readouterr().err
    assert contents(tmp_path / "logs") == {"events": b""}


# --- damage -----------------------------------------------------------------------------------


def edit_in_place(entry):
    (entry / "model").write_text("WEIGHTS")


def lengthen(entry):
    with (entry / "model").open("a") as file:
        file.write("!")


def delete_a_file(entry):
    (entry / "adapter/config").unlink()


def add_a_file(entry):
    (entry / "adapter/more").touch()


def cut_the_manifest(entry):
    os.truncate(entry / "manifest.json", 50)


def delete_the_manifest(entry):
    (entry / "manifest.json").unlink()


def put_a_link(entry):
    (entry / "model").rename(entry.parent / "model")
    (entry / "model").symlink_to("../model")


def put_a_linked_folder(entry):
    (entry / "adapter").rename(entry.parent / "adapter")
    (entry / "adapter").symlink_to("../adapter", target_is_directory=True)


def put_a_pipe(entry):
    (entry / "model").unlink()
    os.mkfifo(entry / "model")


def rename_a_listed_file(entry):
    change_manifest(entry, lambda manifest: manifest["files"].update(other="model"))


def change_the_spec(entry):
    change_manifest(entry, lambda manifest: manifest["spec"]["settings"].update(epochs=2))


def change_the_inputs(entry):
    change_manifest(entry, lambda manifest: manifest["inputs"].update(model="0"))


def change_manifest(entry, change):
    manifest = json.loads((entry / "manifest.json").read_text())
    change(manifest)
    (entry / "manifest.json").write_text(json.dumps(manifest))


def nest_the_manifest(entry):
    (entry / "manifest.json").write_text('{"facts": ' + "[" * 100_000 + "]" * 100_000 + "}")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (edit_in_place, "model has other content"),
        (lengthen, "model has another size"),
        (delete_a_file, "adapter/config is missing"),
        (add_a_file, "adapter/more is not in the manifest"),
        (cut_the_manifest, "manifest.json cannot be read"),
        (nest_the_manifest, "manifest.json cannot be read"),
        (delete_the_manifest, "manifest.json cannot be read"),
        (put_a_link, "model is not a regular file"),
        (put_a_linked_folder, "adapter is not a regular file"),
        (put_a_pipe, "model is not a regular file"),
        (rename_a_listed_file, "manifest.json has no size and sha256 of 'other'"),
        (change_the_spec, "manifest.json belongs to another result"),
        (change_the_inputs, "manifest.json belongs to another result"),
    ],
)
def test_a_damaged_entry_is_removed_and_not_taken(cache, result, target, damage, problem, capsys):
    key = make_result(result)
    cache.put(key, result)
    damage(entry_folder(cache, key))
    assert cache.verify() == [f"{entry_folder(cache, key)}: {problem}"]
    assert not cache.take(key, target)
    assert not target.exists()
    warning = f"warning: {entry_folder(cache, key).parent} is damaged and ignored: {problem}\n"
    assert capsys.readouterr().err == warning
    assert is_empty(cache)
    # The next build stores it again.
    shutil.rmtree(result)
    cache.put(make_result(result), result)
    assert cache.take(key, target)
    assert cache.verify() == []


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../secret", "adapter/../../secret", "", ".", "a//b", "./model", "README.md"],
)
def test_paths_that_lead_outside_are_not_taken(cache, result, stored, tmp_path, target, name):
    (entry_folder(cache, stored).parent / "secret").write_text("mine")
    properties = {"size": 4, "sha256": "0" * 64}
    change_manifest(
        entry_folder(cache, stored), lambda manifest: manifest["files"].update({name: properties})
    )
    assert cache.verify() == [f"{entry_folder(cache, stored)}: manifest.json lists {name!r}"]
    assert not cache.take(stored, target)
    assert not target.exists() and not (tmp_path / "secret").exists()


def test_a_damaged_record_costs_nothing_but_its_texts(cache, stored, target):
    record = entry_folder(cache, stored).with_name("entry.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"host": "\x1b[2Jnode"}))
    assert cache.entries()[0].host == "?[2Jnode"
    record.write_text("{")
    assert (cache.entries()[0].key, cache.entries()[0].path) == (stored, "")
    assert cache.take(stored, target)


@pytest.mark.parametrize("change", [shutil.rmtree, lambda folder: (folder / "model").unlink()])
def test_what_is_no_result_is_not_stored(cache, result, change, capsys):
    key = make_result(result)
    change(result)
    cache.put(key, result)
    error = capsys.readouterr().err
    assert error.startswith(f"warning: {result} is not stored in {cache.folder}: ")
    assert error.count("\n") == 1
    assert not cache.entries()


def test_a_result_is_not_stored_under_the_key_of_another(cache, result, capsys):
    make_result(result)
    cache.put("0" * 64, result)
    assert "manifest.json belongs to another result" in capsys.readouterr().err
    assert not cache.entries()


# --- folders that cannot be written or read ---------------------------------------------------


def raise_error(number):
    """A function that fails as a system call does."""

    def fail(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", ["link", "rename"])
def test_a_full_or_failing_cache_is_a_warning(cache, result, number, call, capsys, monkeypatch):
    key = make_result(result)
    monkeypatch.setattr(os, call, raise_error(number))
    cache.put(key, result)
    line = f"warning: {result} is not stored in {cache.folder}: {os.strerror(number)}\n"
    assert capsys.readouterr().err == line
    assert is_empty(cache)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_read_only_cache_is_read(cache, result, stored, target, number, capsys, monkeypatch):
    other = make_result(result.with_name("other"))
    write = raise_error(number)
    taken = entry_folder(cache, stored)
    for name in ("mkdir", "utime", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os,
            name,
            lambda path, *rest, real=real, **options: (
                write(path) if cache.folder in Path(path).parents else real(path, *rest, **options)
            ),
        )
    assert cache.take(stored, target)
    cache.put(other, result.with_name("other"))
    line = f"is not stored in {cache.folder}: {os.strerror(number)}\n"
    assert capsys.readouterr().err == f"warning: {result.with_name('other')} {line}"
    # A damaged entry cannot be removed there.
    (taken / "model").unlink()
    assert not cache.take(stored, target.with_name("second"))
    assert "is damaged and ignored" in capsys.readouterr().err
    assert taken.exists()


def test_a_cache_below_a_file_is_a_warning(result, tmp_path, target, capsys):
    (tmp_path / "file").touch()
    cache = ResultCache(tmp_path / "file/cache", 1)
    key = make_result(result)
    cache.put(key, result)
    assert capsys.readouterr().err.endswith(f": {os.strerror(errno.ENOTDIR)}\n")
    assert not cache.take(key, target)
    assert cache.entries() == [] and cache.collect(0, 0) == []


def test_an_entry_that_cannot_be_read_is_ignored(cache, stored, target, capsys, monkeypatch):
    monkeypatch.setattr(os, "link", raise_error(errno.EACCES))
    real = os.open
    monkeypatch.setattr(
        os,
        "open",
        lambda path, *rest, **options: (
            raise_error(errno.EACCES)(path)
            if str(path).endswith("model")
            else real(path, *rest, **options)
        ),
    )
    assert not cache.take(stored, target)
    assert "is ignored: Permission denied: " in capsys.readouterr().err
    assert not target.exists() and cache.entries()


def test_folders_have_the_mode_of_the_cache_whatever_the_umask(cache, result):
    cache.folder.mkdir()
    cache.folder.chmod(0o2770)
    before = os.umask(0o077)
    try:
        cache.put(make_result(result), result)
    finally:
        os.umask(before)
    folders = [path for path in cache.folder.rglob("*") if path.is_dir()]
    assert len(folders) == 6
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o2770}
    [record] = cache.folder.rglob("entry.json")
    assert stat.S_IMODE(record.stat().st_mode) == 0o660


# --- several processes ------------------------------------------------------------------------

PUT = """
import sys, time
from pathlib import Path
from snakechat.workflow.manifest import result_key
from snakechat.workflow.result_cache import ResultCache
folder, key, *results, start = sys.argv[1:]
time.sleep(max(0, float(start) - time.time()))
for result in results:
    ResultCache(Path(folder), None).put(key, Path(result))
"""


def test_two_processes_put_one_key_at_once(cache, tmp_path, target):
    results = [tmp_path / f"{clone}/output/sft/tiny" for clone in "ab"]
    files = {f"model-{number}": str(number) for number in range(200)}
    keys = {make_result(result, files) for result in results}
    [key] = keys
    start = str(time.time() + 1)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PUT, cache.folder, key, result, start],
            cwd=ROOT / "scripts",
            stderr=subprocess.PIPE,
            text=True,
        )
        for result in results
    ]
    assert [process.communicate()[1] for process in processes] == ["", ""]
    assert [process.returncode for process in processes] == [0, 0]
    assert [entry.key for entry in cache.entries()] == [key]
    assert list((cache.folder / "tmp").iterdir()) == []
    assert cache.verify() == [] and cache.take(key, target)


def test_the_first_of_two_writers_wins(cache, result, tmp_path, monkeypatch, capsys):
    key = make_result(result, {"log": "first"})
    other = tmp_path / "clone/output/sft/tiny"
    assert make_result(other, {"log": "second"}) == key
    place = result_cache.place_result

    def place_late(*arguments, **options):
        monkeypatch.setattr(result_cache, "place_result", place)
        cache.put(key, result)
        place(*arguments, **options)

    monkeypatch.setattr(result_cache, "place_result", place_late)
    cache.put(key, other)
    assert (entry_folder(cache, key) / "log").read_text() == "first"
    assert list((cache.folder / "tmp").iterdir()) == []
    assert not capsys.readouterr().err


def test_an_entry_that_is_removed_meanwhile_is_taken_whole_or_not_at_all(
    cache, result, tmp_path, capsys
):
    key = make_result(result, {f"model-{number}": str(number) for number in range(30)})
    whole = contents(result)
    stop = threading.Event()

    def remove():
        while not stop.is_set():
            cache.put(key, result)
            cache.collect(None, 0)

    thread = threading.Thread(target=remove)
    thread.start()
    taken, started = [], time.monotonic()
    # Until some were there and some were not, and 0.5 s at least.
    while time.monotonic() < started + 0.5 or (
        len(set(taken)) < 2 and time.monotonic() < started + 30
    ):
        target = tmp_path / f"taken-{len(taken)}"
        taken.append(cache.take(key, target))
        assert target.exists() == taken[-1]
        assert not taken[-1] or contents(target) == whole
        shutil.rmtree(target, ignore_errors=True)
    stop.set()
    thread.join()
    assert set(taken) == {True, False}
    assert not capsys.readouterr().err


# --- removal ----------------------------------------------------------------------------------


def store(cache, folder, name, size, hours):
    """Store a result whose files nothing else has, last used some hours ago."""
    result = folder / f"output/sft/{name}"
    key = make_result(result, {"model": name * size})
    cache.put(key, result)
    shutil.rmtree(result)
    used = time.time() - hours * HOUR
    os.utime(entry_folder(cache, key).with_name("entry.json"), (used, used))
    return key


def names(entries):
    return [entry.name for entry in entries]


def test_the_least_recently_used_entries_are_removed_until_the_rest_fits(cache, tmp_path):
    for name, hours in (("b", 2), ("c", 1), ("a", 3)):
        store(cache, tmp_path, name, 100, hours)
    assert cache.collect(300, None) == []
    assert names(cache.collect(200, None)) == ["a"]
    assert names(cache.entries()) == ["b", "c"]
    assert names(cache.collect(199, None)) == ["b"]
    assert names(cache.collect(0, None)) == ["c"]
    assert is_empty(cache)


def test_taking_a_result_is_a_use(cache, tmp_path):
    first, _ = (store(cache, tmp_path, name, 100, hours) for name, hours in (("a", 3), ("b", 2)))
    assert cache.take(first, tmp_path / "taken")
    shutil.rmtree(tmp_path / "taken")
    assert names(cache.collect(100, None)) == ["b"]


def test_old_entries_are_removed(cache, tmp_path):
    for name, days in (("a", 91), ("b", 89)):
        store(cache, tmp_path, name, 1, 24 * days)
    assert names(cache.collect(None, 90)) == ["a"]
    assert names(cache.entries()) == ["b"]


def test_files_that_results_share_use_no_space(cache, result, stored, tmp_path):
    store(cache, tmp_path, "b", 100, -1)
    # The entry of the result is older, but removing it would free nothing.
    assert cache.collect(100, None) == []
    assert names(cache.collect(99, None)) == ["b"]
    assert names(cache.collect(0, None)) == []
    shutil.rmtree(result)
    assert names(cache.collect(len("weights{}"), None)) == []
    assert names(cache.collect(len("weights{}") - 1, None)) == ["tiny"]


def test_a_file_of_two_entries_counts_once(cache, result, stored):
    manifest = json.loads((result / "manifest.json").read_text())
    manifest["spec"]["settings"] = {"epochs": 2}
    write_manifest(result, manifest)
    cache.put(result_key(manifest["spec"], manifest["inputs"]), result)
    shutil.rmtree(result)
    assert len(cache.entries()) == 2
    assert cache.collect(len("weights{}"), None) == []
    assert len(cache.collect(len("weights{}") - 1, None)) == 2


def test_only_old_leftovers_of_killed_processes_are_deleted(cache, stored):
    for name, days in (("written", 0.9), ("old", 1.1)):
        folder = cache.folder / "tmp" / name / "result"
        folder.mkdir(parents=True)
        (folder / "model").touch()
        for path in (folder / "model", folder, folder.parent):
            os.utime(path, (time.time() - days * DAY,) * 2)
    cache.collect(None, None)
    assert [path.name for path in (cache.folder / "tmp").iterdir()] == ["written"]
    # A writer that links an old file is at work nevertheless.
    os.utime(cache.folder / "tmp/written/result/model", (0, 0))
    cache.collect(None, None)
    assert (cache.folder / "tmp/written").exists()


def test_a_limit_is_kept_now_and_then(tmp_path, monkeypatch):
    cache = ResultCache(tmp_path / "cache", 150)
    store(cache, tmp_path, "a", 100, 3)
    store(cache, tmp_path, "b", 100, 2)
    # The last check was a moment ago.
    store(cache, tmp_path, "c", 100, 1)
    assert names(cache.entries()) == ["a", "b", "c"]
    monkeypatch.setattr(result_cache, "COLLECT_INTERVAL", 0)
    # The new result itself is not in the cache alone yet.
    store(cache, tmp_path, "d", 100, 0)
    assert names(cache.entries()) == ["c", "d"]


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("7", 7), ("2K", 2048), ("500G", 500 << 30), ("1.5T", 3 << 39), ("3 GiB", 3 << 30)],
)
def test_sizes_are_read(text, number):
    assert parse_size(text) == number


@pytest.mark.parametrize("text", ["", "G", "-1G", "5 apples", "1,5G", "nan"])
def test_other_texts_are_no_sizes(text):
    with pytest.raises(InputError, match="such as 500G"):
        parse_size(text)
