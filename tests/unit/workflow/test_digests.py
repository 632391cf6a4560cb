"""Digests of values and files, the cache of file digests, and atomic writes."""

import errno
import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from conftest import ROOT
from snakechat.workflow import digests
from snakechat.workflow.digests import (
    DigestCache,
    digest,
    file_digest,
    file_digests,
    fsync,
    write_atomically,
)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        ([1, 2], [2, 1]),
        (1, "1"),
        ({"a": [1, {"b": 2.0}]}, {"a": [1, {"b": 2}]}),
        (0, False),
        ({"a": None}, {}),
    ],
)
def test_different_values_have_different_digests(first, second):
    assert digest(first) != digest(second)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_raise_an_error(value):
    with pytest.raises(ValueError, match="JSON"):
        digest({"a": [value]})


def test_a_digest_is_the_sha256_of_the_canonical_json():
    assert digest({"b": 1.0, "a": "x"}) == hashlib.sha256(b'{"a":"x","b":1.0}').hexdigest()


def test_a_file_digest_is_the_sha256_of_the_bytes(tmp_path):
    path = tmp_path / "file"
    # More than one chunk.
    content = bytes(range(256)) * 8193
    path.write_bytes(content)
    assert file_digest(path) == hashlib.sha256(content).hexdigest()


@pytest.fixture
def cache_path(tmp_path):
    return tmp_path / "cache" / "digests.json"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"first")
    return path


def edit_in_place(path, content):
    """Overwrite a file without replacing it, and restore its modification time."""
    before = path.stat()
    # Some file systems have the resolution of the kernel's clock tick: edits within one tick have
    # the same times.
    time.sleep(0.03)
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_mtime_ns, after.st_size, after.st_ino) == (
        before.st_mtime_ns,
        before.st_size,
        before.st_ino,
    )


@pytest.fixture
def later(monkeypatch):
    """Move the clock forward, so that no file is recent."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 10)


@pytest.fixture
def coarse_times(file, monkeypatch):
    """Give the file the times of a file system whose clock ticks once a second, within one tick."""
    status_of, tick = os.stat, int(time.time()) * 10**9

    def coarse(path, **options):
        status = status_of(path, **options)
        if path != str(file):
            return status
        return SimpleNamespace(
            st_size=status.st_size, st_ino=status.st_ino, st_mtime_ns=tick, st_ctime_ns=tick
        )

    monkeypatch.setattr(os, "stat", coarse)


def test_the_cache_returns_the_digest_of_the_content(cache_path, file):
    assert DigestCache(cache_path)[file] == hashlib.sha256(b"first").hexdigest()


def test_the_cache_detects_an_edit_whose_modification_time_was_restored(cache_path, file):
    cache = DigestCache(cache_path)
    first = cache[file]
    edit_in_place(file, b"other")
    assert cache[file] == hashlib.sha256(b"other").hexdigest() != first


def test_a_touched_or_rewritten_file_keeps_its_digest(cache_path, file):
    cache = DigestCache(cache_path)
    first = cache[file]
    os.utime(file, (1, 1))
    assert cache[file] == first
    file.unlink()
    file.write_bytes(b"first")
    assert cache[file] == first


def test_an_unchanged_file_is_not_read_again(cache_path, file, later, monkeypatch):
    cache = DigestCache(cache_path)
    first = cache[file]
    cache.save()

    def fail(path, report=None):
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr(digests, "file_digest", fail)
    assert cache[file] == DigestCache(cache_path)[file] == first


def test_an_edit_within_one_tick_of_coarse_times_is_detected(cache_path, file, coarse_times):
    cache = DigestCache(cache_path)
    first = cache[file]
    file.write_bytes(b"other")
    assert cache[file] == hashlib.sha256(b"other").hexdigest() != first
    cache.save()
    file.write_bytes(b"again")
    assert DigestCache(cache_path)[file] == hashlib.sha256(b"again").hexdigest()


def test_a_file_that_changes_while_it_is_digested_is_not_cached(
    cache_path, file, later, monkeypatch
):
    cache = DigestCache(cache_path)

    def slow_digest(path):
        found = file_digest(path)
        file.write_bytes(b"a longer text")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(digests, "file_digest", slow_digest)
        assert cache[file]
    assert cache[file] == hashlib.sha256(b"a longer text").hexdigest()


def entry_of(path, digest="0" * 64):
    """An entry with today's identity of a file."""
    return [*digests.file_identity(path), digest]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: b'{"a": [1, 2',
        lambda path: b"\xff\xfe\x00",
        lambda path: b"[" * 100_000,
        lambda path: b"[]",
        lambda path: json.dumps({str(path): 7}).encode(),
        lambda path: json.dumps({str(path): entry_of(path)[:4]}).encode(),
        lambda path: json.dumps({str(path): entry_of(path, "")}).encode(),
        lambda path: json.dumps({str(path): [entry_of(path)[:4], "0" * 64]}).encode(),
    ],
)
def test_a_damaged_cache_is_ignored_and_rewritten(cache_path, file, later, damage):
    cache_path.parent.mkdir()
    cache_path.write_bytes(damage(file))
    cache = DigestCache(cache_path)
    expected = hashlib.sha256(b"first").hexdigest()
    assert cache[file] == expected
    cache.save()
    assert json.loads(cache_path.read_text()) == {str(file): entry_of(file, expected)}


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path, file, later):
    (tmp_path / "no folder").write_bytes(b"")
    cache = DigestCache(tmp_path / "no folder/digests.json")
    assert cache[file] == hashlib.sha256(b"first").hexdigest()
    cache.save()


def test_a_saved_cache_keeps_the_entries_of_other_processes(cache_path, tmp_path, file, later):
    first, second = DigestCache(cache_path), DigestCache(cache_path)
    (tmp_path / "other").write_bytes(b"other")
    assert first[file] and second[tmp_path / "other"]
    first.save()
    second.save()
    assert len(json.loads(cache_path.read_text())) == 2


def test_a_process_saves_the_cache_when_it_ends(cache_path, file):
    os.utime(file, (1, 1))
    program = f"""
import os, time
now = time.time
time.time = lambda: now() + 10
from snakechat.workflow.digests import DigestCache
DigestCache("cache/digests.json")[{str(file)!r}]
os.chdir("/")
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    command = [sys.executable, "-c", program]
    subprocess.run(command, cwd=cache_path.parent.parent, env=environment, check=True)
    assert str(file) in json.loads(cache_path.read_text())


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    paths = [folder / f"{number}.jsonl" for number in range(3000)]
    for number, path in enumerate(paths):
        path.write_text(f"{number}\n")
    return paths


def test_the_cache_is_not_written_for_each_file(cache_path, many, later, monkeypatch):
    writes = []
    monkeypatch.setattr(digests, "write_atomically", lambda *_, **__: writes.append(1))
    cache = DigestCache(cache_path)
    for path in many[:100]:
        assert cache[path]
    assert len(writes) <= 1


def test_digests_are_in_the_order_of_the_paths(cache_path, many, tmp_path, later):
    """Pins of libraries are digests of lists of files."""
    large = tmp_path / "large"
    large.write_bytes(bytes(3 << 20))
    paths = [large, *many[:50]]
    found = file_digests(paths)
    assert list(found) == paths and found == {path: file_digest(path) for path in paths}
    assert file_digests([]) == {}
    cache = DigestCache(cache_path)
    cache.digests(many[20:])
    assert list(cache.digests(paths)) == paths


def test_a_file_that_cannot_be_read_is_the_error(many, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError):
        file_digests([*many[:10], tmp_path / "missing"])
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        file_digests([tmp_path / "folder", *many[:1000]])


def test_long_work_shows_lines_of_progress(monkeypatch, capsys):
    monkeypatch.setattr(digests, "FIRST_PROGRESS", 0)
    file_digests([ROOT / name for name in ("Snakefile", "config.yaml", "README.md")])
    assert capsys.readouterr().err.endswith("reading: 3 of 3 files\n")


def test_neither_an_error_nor_an_interrupt_waits_for_a_large_file(tmp_path, monkeypatch):
    large = tmp_path / "large"
    large.write_bytes(bytes(1 << 20))
    monkeypatch.setattr(digests, "CHUNK_BYTES", 1 << 10)
    missing, reads = tmp_path / "missing", []

    class Slow(io.FileIO):
        def read(self, size=-1):
            reads.append(size)
            time.sleep(0.01)
            return super().read(size)

    monkeypatch.setattr(digests, "open", lambda path, *_, **__: Slow(path), raising=False)
    with pytest.raises(FileNotFoundError):
        file_digests([missing, large])
    assert len(reads) < 100


def test_a_link_has_the_digest_of_its_current_target(cache_path, file, tmp_path):
    cache = DigestCache(cache_path)
    link = tmp_path / "link"
    link.symlink_to(file)
    assert cache[link] == hashlib.sha256(b"first").hexdigest()
    (tmp_path / "elsewhere").write_bytes(b"other")
    link.unlink()
    link.symlink_to(tmp_path / "elsewhere")
    assert cache[link] == hashlib.sha256(b"other").hexdigest()


def test_an_atomic_write_creates_folders_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "a" / "b" / "file.json"
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert path.read_text() == "two"
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]


@pytest.fixture
def calls(monkeypatch):
    """The names of the system calls that store and rename, in order."""
    names, fsync, replace = [], os.fsync, os.replace

    def record_fsync(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        names.append("fsync folder" if is_folder else "fsync file")
        fsync(descriptor)

    def record_replace(*paths):
        names.append("rename")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    return names


def test_a_text_is_on_disk_before_its_name_and_the_name_before_the_end(tmp_path, calls):
    write_atomically(tmp_path / "file.json", "text")
    assert calls == ["fsync file", "rename", "fsync folder"]


def test_a_text_that_may_be_lost_is_not_waited_for(tmp_path, calls):
    write_atomically(tmp_path / "file.json", "text", durable=False)
    assert calls == ["rename"]


def test_a_file_system_that_cannot_store_folders_is_no_error(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", fail)
    fsync(tmp_path)


def test_a_disk_that_fails_is_an_error(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        write_atomically(tmp_path / "file.json", "text")


def test_a_failed_write_keeps_the_old_text(tmp_path):
    path = tmp_path / "file.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "old"
