"""Digests of values and files, their cache, atomic writes; manifests, records of runs, lineages."""

import errno
import hashlib
import json
import os
import stat
import time

import pytest

from snakechat.workflow import manifest as manifests
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import (
    DigestCache,
    content_digest,
    digest,
    file_digest,
    file_digests,
    fsync,
    merge_lineages,
    named_lineage,
    planned_files,
    read_manifest,
    read_run_record,
    recorded_inputs,
    result_id,
    sealed_json,
    upstream_first,
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
    monkeypatch.setattr(manifests, "file_identity", lambda path: [5, tick, tick, 1])
    cached()
    file.write_bytes(b"other")
    assert cached() == sha256(b"other")


def test_a_file_that_changes_while_it_is_digested_is_not_cached(cached, file, later, monkeypatch):
    def slow_digest(path, *_):
        found = file_digest(path)
        file.write_bytes(b"a longer text")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(manifests, "file_digest", slow_digest)
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
    monkeypatch.setattr(manifests, "file_digest", pytest.fail)
    assert cache.digests([file]) == DigestCache(path).digests([file]) == {file: sha256(b"first")}


def test_a_cache_keeps_the_entries_of_other_processes_and_need_not_be_writable(
    tmp_path, file, later
):
    first, second = (DigestCache(tmp_path / "digests.json") for _ in range(2))
    (tmp_path / "other").write_bytes(b"other")
    assert first.digests([file]) and second.digests([tmp_path / "other"])
    assert len(json.loads((tmp_path / "digests.json").read_text())) == 2
    assert DigestCache(file / "digests.json").digests([file]) == {file: sha256(b"first")}


def test_an_error_does_not_wait_for_a_large_file(tmp_path):
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 40 << 30)
    started = time.monotonic()
    with pytest.raises(FileNotFoundError):
        file_digests([tmp_path / "gone", tmp_path / "large"])
    assert time.monotonic() - started < 10


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


# --- manifests ----------------------------------------------------------------------------------

MANIFEST = {"spec": {}, "inputs": {}, "lineage": {}, "files": {}}
MANIFEST["facts"] = {"rows": 3, "share": 0.1}


@pytest.mark.parametrize("content", [b"", b"[" * 5000, b"\xff\xfe\0", b"null", b"{}"], ids=range(5))
def test_a_file_that_is_no_manifest_is_none(tmp_path, content):
    for name in ("manifest.json", "run.json"):
        (tmp_path / name).write_bytes(content)
    assert read_manifest(tmp_path / "manifest.json") is read_run_record(tmp_path) is None


def test_any_change_of_a_value_is_noticed(tmp_path):
    path = tmp_path / "manifest.json"
    text = sealed_json(MANIFEST)
    path.write_text(text)
    assert read_manifest(path) == MANIFEST
    for old, new in (('"rows": 3', '"rows": 4'), ("0.1", "Infinity"), ('"lineage": {},', "")):
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        assert read_manifest(path) is None
    # Of another form.
    path.write_text(sealed_json({"spec": {}}))
    assert read_manifest(path) is None


def test_the_record_of_another_spec_counts_only_if_its_result_was_accepted(tmp_path):
    record = {"spec": "before"}
    (tmp_path / "run.json").write_text(sealed_json(record))
    assert read_run_record(tmp_path) == record
    assert read_run_record(tmp_path, {"spec": "before"}) == record
    assert read_run_record(tmp_path, {"spec": "after"}) is None
    accepted = [{"from": "before", "to": "between"}, {"from": "between", "to": "after"}]
    assert read_run_record(tmp_path, {"spec": "after", "accepted": accepted}) == record


# --- lineage ------------------------------------------------------------------------------------


def manifest(name, inputs=(), settings=None, **facts):
    """Return the manifest of a job of the rule make_NAME whose inputs have these manifests."""
    rules = {each["spec"]["rule"][5:]: each for each in inputs}
    spec = {"rule": f"make_{name}", "settings": settings or {}, "files": {}, "code": {}}
    spec |= {"inputs": {key: {"rule": f"make_{key}"} for key in rules}, "requirements": {}}
    files = {"rows": {"size": 1, "sha256": name}}
    recorded = recorded_inputs(spec, rules)
    lineage = merge_lineages(inputs)
    return {"spec": spec, "inputs": recorded, "lineage": lineage, "facts": facts, "files": files}


@pytest.fixture
def chain():
    """Manifests of data -> split -> tokens and data -> model -> tokens."""
    data = manifest("data", (), {"hub": "mine/data", "revision": "main"}, commit="abc123")
    split = manifest("split", [data])
    model = manifest("model", [data])
    tokens = manifest("tokens", [data, split, model])
    return [data, split, model, tokens]


def test_a_lineage_has_every_upstream_job_once(chain):
    data, split, model, tokens = chain
    assert set(tokens["lineage"]) == {result_id(each) for each in (data, split, model)}
    assert tokens["lineage"][result_id(data)] == {
        "rule": "make_data",
        "settings": {"hub": "mine/data", "revision": "main"},
        "facts": {"commit": "abc123"},
        "files": {"number": 0, "digest": digest({})},
        "spec": digest(data["spec"]),
        "content": content_digest(data),
        "inputs": {},
    }
    assert tokens["lineage"][result_id(split)]["inputs"] == {"data": result_id(data)}
    # The split was made from the version before, which had the same content.
    rebuilt = manifest("data", (), {"hub": "mine/data", "revision": "v2"}, commit="def456")
    jobs = merge_lineages([rebuilt, split])
    assert jobs[result_id(rebuilt)]["facts"] == {"commit": "def456"}
    assert jobs[result_id(data)]["facts"] == {"commit": "abc123"}


NAMES = {
    "output/tokens": {"data": "output/d", "split": "output/s", "model": "output/m"},
    "output/s": {"data": "output/d"},
    "output/m": {"data": "output/d"},
}


def test_a_lineage_by_names_has_each_job_after_its_inputs(chain):
    tokens = chain[-1]
    results = {"output/tokens": result_id(tokens)}
    jobs = named_lineage(results, merge_lineages([tokens]), NAMES)
    paths = ["output/d", "output/m", "output/s", "output/tokens"]
    assert upstream_first(jobs) == paths
    assert [jobs[path]["name"] for path in paths] == ["d", "m", "s", "tokens"]
    assert jobs["output/s"]["inputs"] == ["output/d"]
    # Without names of today, a job has its own.
    unnamed = named_lineage(results, merge_lineages([tokens]), {})
    assert set(unnamed) == {"output/tokens", *map(result_id, chain[:-1])}
