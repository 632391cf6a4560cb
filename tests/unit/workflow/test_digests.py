"""Digests of values and files, the cache of file digests, and atomic writes."""

import errno
import hashlib
import io
import json
import os
import stat
import threading
import time

import pytest

from snakechat.workflow import manifest
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import (
    DigestCache,
    digest,
    file_digest,
    file_digests,
    fsync,
    planned_files,
    write_atomically,
)


def test_a_digest_is_the_sha256_of_the_canonical_json():
    assert digest({"b": 1.0, "a": "x"}) == sha256(b'{"a":"x","b":1.0}')
    with pytest.raises(ValueError, match="JSON"):
        digest({"a": [float("nan")]})


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"first")
    return path


@pytest.fixture
def cached(file, tmp_path):
    """A function that returns the cached digest of the file."""
    cache = DigestCache(tmp_path / "cache/digests.json")
    return lambda: cache.digests([file])[file]


@pytest.fixture
def later(monkeypatch):
    """Move the clock forward, so that no file is recent."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 10)


def test_an_edit_in_place_whose_modification_time_was_restored_is_detected(cached, file, later):
    assert cached() == sha256(b"first")
    before = file.stat()
    # More than a tick of the clock of the file system.
    time.sleep(0.03)
    file.write_bytes(b"other")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cached() == sha256(b"other")


def test_an_edit_within_one_tick_of_coarse_times_is_detected(cached, file, monkeypatch):
    tick = int(time.time()) * 10**9
    monkeypatch.setattr(manifest, "file_identity", lambda path: [5, tick, tick, 1])
    cached()
    file.write_bytes(b"other")
    assert cached() == sha256(b"other")


def test_a_file_that_changes_while_it_is_digested_is_not_cached(cached, file, later, monkeypatch):
    def slow_digest(path, **_):
        found = file_digest(path)
        file.write_bytes(b"a longer text")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "file_digest", slow_digest)
        cached()
    assert cached() == sha256(b"a longer text")


@pytest.mark.parametrize("damaged", [b"\xff\xfe\x00", b"[" * 100_000, b"[]"])
def test_an_unchanged_file_is_not_read_again_and_a_damaged_cache_costs_time_only(
    tmp_path, file, later, damaged, monkeypatch
):
    path = tmp_path / "digests.json"
    path.write_bytes(damaged)
    cache = DigestCache(path)
    assert cache.digests([file]) == {file: sha256(b"first")}
    # A second read would be an error.
    monkeypatch.setattr(manifest, "file_digests", None)
    assert cache.digests([file]) == DigestCache(path).digests([file]) == {file: sha256(b"first")}


def test_a_cache_keeps_the_entries_of_other_processes_and_need_not_be_writable(
    tmp_path, file, later
):
    first, second = (DigestCache(tmp_path / "digests.json") for _ in range(2))
    (tmp_path / "other").write_bytes(b"other")
    assert first.digests([file]) and second.digests([tmp_path / "other"])
    assert len(json.loads((tmp_path / "digests.json").read_text())) == 2
    assert DigestCache(file / "digests.json").digests([file]) == {file: sha256(b"first")}


def test_digests_are_in_the_order_of_the_paths(tmp_path, later):
    """Pins of libraries are digests of lists of files."""
    # More than one chunk, and others.
    contents = {tmp_path / "large": bytes(range(256)) * 8193}
    contents |= {tmp_path / f"{n}.jsonl": f"{n}\n".encode() for n in range(50)}
    for path, content in contents.items():
        path.write_bytes(content)
    found = file_digests(contents)
    assert list(found.items()) == [(path, sha256(each)) for path, each in contents.items()]
    cache = DigestCache(tmp_path / "cache")
    cache.digests(list(contents)[20:])
    assert list(cache.digests(contents)) == list(contents)


def test_neither_an_error_nor_an_interrupt_waits_for_a_large_file(tmp_path, monkeypatch):
    large, missing = tmp_path / "large", tmp_path / "missing"
    large.write_bytes(bytes(1 << 20))
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 1 << 10)
    started, reads = threading.Event(), []

    class Slow(io.FileIO):
        def read(self, size=-1):
            started.set()
            reads.append(size)
            time.sleep(0.01)
            return super().read(size)

    def slow_open(path, *_, **__):
        assert path == large or started.wait(10)
        return Slow(path)

    monkeypatch.setattr(manifest, "open", slow_open, raising=False)
    with pytest.raises(FileNotFoundError):
        file_digests([missing, large])
    assert len(reads) < 100


def test_an_atomic_write_leaves_the_new_text_or_the_old_one_and_nothing_else(tmp_path):
    path = tmp_path / "a" / "b" / "file.json"
    write_atomically(path, "one")
    write_atomically(path, "two")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "two"
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]


def test_a_text_is_on_disk_before_its_name_unless_it_may_be_lost(tmp_path, monkeypatch):
    calls = []

    def fsync(descriptor):
        calls.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda *_: calls.append("rename"))
    write_atomically(tmp_path / "file.json", "text")
    # The file, and its folder.
    assert calls == [False, "rename", True]
    write_atomically(tmp_path / "file.json", "text", durable=False)
    assert calls[3:] == ["rename"]


def test_a_disk_that_fails_is_an_error_and_a_file_system_without_fsync_is_not(
    tmp_path, monkeypatch
):
    def fail(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    number = errno.EINVAL
    fsync(tmp_path)
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        fsync(tmp_path)


# --- external files ---------------------------------------------------------------------------

CONTENT = b"as planned"
PLANNED = r"source.jsonl changed since this build was planned"
READ = r"source.jsonl changed while it was read: [a-z ]+$"


def edit_and_restore(path):
    """Edit a file in place and undo it, with its old modification time."""
    path.write_bytes(b"!")
    path.write_bytes(CONTENT)
    os.utime(path, (10**9, 10**9))


CHANGES = [(PLANNED, lambda path: path.write_bytes(b"other")), (PLANNED, os.unlink)]
CHANGES += [(READ, edit_and_restore), (READ, os.unlink)]


@pytest.mark.parametrize(("message", "change"), CHANGES)
def test_a_change_since_planning_or_while_reading_is_noticed(tmp_path, message, change):
    source = tmp_path / "source.jsonl"
    source.write_bytes(CONTENT)
    os.utime(source, (10**9, 10**9))
    # Later changes get another time than this one.
    time.sleep(0.02)
    planned = {source: sha256(CONTENT)}
    with planned_files(planned):
        assert source.read_bytes() == CONTENT
    if message == PLANNED:
        change(source)
    with pytest.raises(InputError, match=message), planned_files(planned):
        assert message == READ
        change(source)
