"""Digests of values and files, the cache of file digests, and atomic writes."""

import hashlib
import os
import threading
import time

import pytest

from snakechat.workflow import digests
from snakechat.workflow.digests import (
    DigestCache,
    canonical_json,
    digest,
    file_digest,
    write_atomically,
)


def test_canonical_json_sorts_keys_and_has_no_blanks():
    assert canonical_json({"b": [1, 2.5, None], "a": True}) == '{"a":true,"b":[1,2.5,null]}'


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 1.0),
        ({"a": [1, {"b": 2.0}]}, {"a": [1.0, {"b": 2}]}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (1e-5, 0.00001),
        (1e3, 1000),
    ],
)
def test_equal_values_have_the_same_digest(first, second):
    assert digest(first) == digest(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        ([1, 2], [2, 1]),
        ([[1], 2], [1, [2]]),
        (1, "1"),
        (1, 1.0000001),
        (1, True),
        (0, None),
        (0, False),
        ("", None),
        ({}, []),
        ({"a": None}, {}),
        ("a", "A"),
    ],
)
def test_different_values_have_different_digests(first, second):
    assert digest(first) != digest(second)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_raise_an_error(value):
    with pytest.raises(ValueError, match="JSON"):
        digest({"a": [value]})


def test_a_digest_is_the_sha256_of_the_canonical_json():
    assert digest({"b": 1.0, "a": "x"}) == hashlib.sha256(b'{"a":"x","b":1}').hexdigest()


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


def test_the_cache_returns_the_digest_of_the_content(cache_path, file):
    assert DigestCache(cache_path)[file] == hashlib.sha256(b"first").hexdigest()


def test_the_cache_detects_an_edit_whose_modification_time_was_restored(cache_path, file):
    cache = DigestCache(cache_path)
    first = cache[file]
    edit_in_place(file, b"other")
    assert cache[file] == hashlib.sha256(b"other").hexdigest() != first


def test_a_reloaded_cache_detects_the_edit_too(cache_path, file):
    DigestCache(cache_path)[file]
    edit_in_place(file, b"other")
    assert DigestCache(cache_path)[file] == hashlib.sha256(b"other").hexdigest()


def test_a_touched_or_rewritten_file_keeps_its_digest(cache_path, file):
    cache = DigestCache(cache_path)
    first = cache[file]
    os.utime(file, (1, 1))
    assert cache[file] == first
    file.unlink()
    file.write_bytes(b"first")
    assert cache[file] == first


def test_an_unchanged_file_is_not_read_again(cache_path, file, monkeypatch):
    first = DigestCache(cache_path)[file]

    def fail(path):
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr(digests, "file_digest", fail)
    assert DigestCache(cache_path)[file] == first


def test_a_link_has_the_digest_of_its_current_target(cache_path, file, tmp_path):
    cache = DigestCache(cache_path)
    link = tmp_path / "link"
    link.symlink_to(file)
    assert cache[link] == hashlib.sha256(b"first").hexdigest()
    (tmp_path / "elsewhere").write_bytes(b"other")
    link.unlink()
    link.symlink_to(tmp_path / "elsewhere")
    assert cache[link] == hashlib.sha256(b"other").hexdigest()


def test_a_deleted_file_raises_an_error(cache_path, file):
    cache = DigestCache(cache_path)
    assert cache[file]
    file.unlink()
    with pytest.raises(FileNotFoundError):
        cache[file]


def test_an_atomic_write_creates_folders_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "a" / "b" / "file.json"
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert path.read_text() == "two"
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]


def test_a_failed_write_keeps_the_old_text(tmp_path):
    path = tmp_path / "file.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"


def test_a_concurrent_reader_gets_the_old_or_the_new_text(tmp_path):
    path = tmp_path / "file.json"
    texts = ["a" * 200_000, "b" * 200_000]
    write_atomically(path, texts[0])
    done = threading.Event()

    def write():
        for number in range(200):
            write_atomically(path, texts[number % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(path.read_text())
    writer.join()
    assert seen <= set(texts)
