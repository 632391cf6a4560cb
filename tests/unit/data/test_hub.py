"""Downloads from a local server that implements the hub's protocol.

Downloads run in a subprocess, because huggingface_hub reads its environment when it is imported.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest

from conftest import ROOT
from support.hub import ELSEWHERE, name_of, serving

pytestmark = pytest.mark.slow

DATA = {
    "a.parquet": random.Random(1).randbytes(3_000_000),
    "b.parquet": random.Random(2).randbytes(100_000),
    "folder/c.txt": b"a small file, which git keeps\n",
    "folder/empty.txt": b"",
    "not_chosen.bin": b"0" * 100,
}
CHOSEN = [name for name in DATA if name != "not_chosen.bin"]

# The library resumes at whole chunks of 10 MB: small chunks let small files behave like large ones.
CHUNK = 1 << 10

PROGRAM = """
import json, sys, time
import huggingface_hub.constants
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
import snakechat.data.hub
from snakechat.workflow.errors import InputError

def choose(paths):
    return [path for path in paths if not path.startswith("not_")]

BEFORE
for repository in sys.argv[2:]:
    try:
        folder, paths, commit = snakechat.data.hub.fetch(repository, "dataset", sys.argv[1], choose)
        print(json.dumps([str(folder), paths, commit]))
    except InputError as error:
        print(json.dumps(f"{error}"))
"""
NO_WAITS = "time.sleep = lambda seconds: None"


def start(endpoint, home, *repositories, revision="main", before="", **environment):
    """Start a process that fetches from each repository into the cache at home."""
    inherited = {key: os.environ[key] for key in os.environ if not key.startswith("HF_")}
    program = PROGRAM.replace("CHUNK_BYTES", str(CHUNK)).replace("BEFORE", before)
    local = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1,localhost"}
    return subprocess.Popen(
        [sys.executable, "-c", program, revision, *repositories],
        env={**inherited, **local, "PYTHONPATH": str(ROOT / "scripts"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fetch(*arguments, **options):
    """Return the result or error of fetch for each repository, and standard error."""
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()], err


def check(result, commit, files=DATA, paths=CHOSEN):
    """Check that the folder has all chosen files, byte for byte."""
    folder, found, found_commit = result
    assert (found, found_commit) == (sorted(paths), commit)
    for name in paths:
        with open(os.path.join(folder, name), "rb") as file:
            assert file.read() == files[name], name


def cached(home):
    """Names of the blobs in the cache."""
    return {path.name for path in home.glob("hub/*/blobs/*")}


def count_requests(hub, name):
    """Return the number of requests for a repository."""
    return len([request for request in hub.requests if name in request.path])


def check_resumed(loads, files=DATA):
    """Check that each response resumed where the previous one ended, up to one chunk."""
    for name, ranges in loads.items():
        assert ranges[0][0] == 0 and ranges[-1][1] == len(files[name]), name
        assert all(0 <= first[1] - then[0] < CHUNK for first, then in pairwise(ranges)), name


@pytest.fixture
def hub():
    """A hub with one dataset."""
    with serving() as hub:
        hub.repositories = {"dataset/lab/data": DATA}
        yield hub


DATASET = "dataset/lab/data"


@pytest.mark.parametrize(
    ("endpoint", "proxy", "message"),
    [
        ("mirror.example", {}, "set HF_ENDPOINT to a URL with https://, it is mirror.example"),
        (
            "http://mirror.example",
            {"ALL_PROXY": "socks5://127.0.0.1:9"},
            "run pip install socksio, or set HTTPS_PROXY and ALL_PROXY to an HTTP proxy",
        ),
    ],
)
def test_an_address_that_cannot_be_used_is_an_error_with_advice(endpoint, proxy, message, tmp_path):
    (error,), _ = fetch(endpoint, tmp_path, "lab/data", before=NO_WAITS, **proxy)
    assert error.startswith("hub dataset lab/data") and error.endswith(message)


def test_files_are_downloaded_once_and_then_read_from_the_cache(hub, tmp_path):
    for _ in range(2):
        (result,), err = fetch(hub.endpoint, tmp_path, "lab/data")
        check(result, hub.commit(DATASET))
        assert err == ""
        assert hub.loads(DATASET) == {name: [(0, len(DATA[name]))] for name in CHOSEN if DATA[name]}


def test_dropped_connections_are_resumed(hub, tmp_path):
    hub.faults[DATASET] = "drop"
    (result,), err = fetch(hub.endpoint, tmp_path, "lab/data", before=NO_WAITS)
    check(result, hub.commit(DATASET))
    loads = hub.loads(DATASET)
    check_resumed(loads)
    assert sum(map(len, loads.values())) > len(loads)
    assert "Trying to resume download" in err


def test_killed_download_keeps_finished_files(hub, tmp_path):
    hub.faults[f"{DATASET}/b.parquet"] = "stall"
    process = start(hub.endpoint, tmp_path, "lab/data")
    until = time.monotonic() + 30
    while not hub.loads(DATASET).get("b.parquet"):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hub.faults.clear()
    (result,), _ = fetch(hub.endpoint, tmp_path, "lab/data")
    check(result, hub.commit(DATASET))
    assert hub.loads(DATASET)["a.parquet"] == [(0, len(DATA["a.parquet"]))]


def test_damaged_file_is_downloaded_again(hub, tmp_path):
    hub.faults[DATASET] = "damaged once"
    (result,), _ = fetch(hub.endpoint, tmp_path, "lab/data")
    check(result, hub.commit(DATASET))
    for name, loads in hub.loads(DATASET).items():
        assert loads == [(0, len(DATA[name]))] * (2 if DATA[name] else 1), name


def test_damaged_file_in_the_cache_is_downloaded_again(hub, tmp_path):
    (result,), _ = fetch(hub.endpoint, tmp_path, "lab/data")
    # As an editor does that renames: the link to the file is gone.
    os.unlink(os.path.join(result[0], "folder/c.txt"))
    for name, data in (("a.parquet", DATA["a.parquet"][:-1]), ("folder/c.txt", b"other\n")):
        with open(os.path.join(result[0], name), "wb") as file:
            file.write(data)
    (result,), _ = fetch(hub.endpoint, tmp_path, "lab/data")
    check(result, hub.commit(DATASET))
    loads = hub.loads(DATASET)
    assert len(loads["a.parquet"]) == 2


@pytest.mark.parametrize("name", ["a.parquet"])
def test_file_that_is_damaged_twice_is_an_error(hub, tmp_path, name):
    files = {name: DATA[name], "other.txt": b"other"}
    hub.repositories[DATASET] = files
    hub.faults[DATASET] = "damaged"
    (line,), _ = fetch(hub.endpoint, tmp_path, "lab/data")
    digest, size = name_of(name, DATA[name]), len(DATA[name])
    start = f"hub dataset lab/data at main: {name} is damaged: expected {size} bytes with digest"
    assert line.startswith(f"{start} {digest}, found {size} bytes with digest ")
    assert len(hub.loads(DATASET)[name]) == 2
    assert not cached(tmp_path)
    assert not [path for path in tmp_path.glob("hub/*/snapshots/**/*") if not path.is_dir()]


def test_errors_of_the_hub_are_one_line(hub, tmp_path):
    faults = {
        "lab/list": "500 Internal Server Error",
        "lab/cut": "peer closed connection",
        "lab/html": "Expecting value: line 1 column 1",
        "lab/bare": "a.parquet: the hub lists neither its size nor its digest",
        "lab/forbidden": "403 Forbidden: not for you",
    }
    for name in faults:
        hub.repositories[f"dataset/{name}"] = DATA
        hub.faults[f"dataset/{name}"] = name.partition("/")[2]
    rejected = {
        "lab/unknown": "404 Client Error. .*Repository Not Found",
        "lab/no--name": "Cannot have -- or .. in repo_id",
    }
    cases = faults | rejected
    lines, _ = fetch(hub.endpoint, tmp_path, *cases, before=NO_WAITS)
    assert len(lines) == len(cases), lines
    for line, (name, reason) in zip(lines, cases.items(), strict=True):
        assert re.match(f"hub dataset {name} at main: .*{reason}", line), line
        assert "\n" not in line
    assert count_requests(hub, "lab/forbidden") == count_requests(hub, "lab/unknown") == 1


def test_token_is_sent_to_the_hub_only(hub, tmp_path):
    hub.tokens[DATASET] = token = "hf_onlythehubmayseeit"
    (line,), _ = fetch(hub.endpoint, tmp_path, "lab/data")
    assert re.match("hub dataset lab/data at main: .*401 .*Invalid username or password", line)
    assert count_requests(hub, "lab/data") == 1
    hub.faults[DATASET], before = "busy", len(hub.requests)
    (result,), err = fetch(hub.endpoint, tmp_path, "lab/data", before=NO_WAITS, HF_TOKEN=token)
    check(result, hub.commit(DATASET))
    requests = [request for request in hub.requests[before:] if "lab/data" in request.path]
    elsewhere = [request for request in requests if request.path.startswith(ELSEWHERE)]
    assert elsewhere and {request.token for request in elsewhere} == {None}
    at_hub = [request for request in requests if request not in elsewhere]
    assert {request.token for request in at_hub} == {f"Bearer {token}"}
    hub.faults[DATASET] = "forbidden"
    (line,), more = fetch(hub.endpoint, tmp_path, "lab/data", HF_TOKEN=token)
    assert "403" in line and token not in line + err + more
    assert not [path for path in tmp_path.rglob("*") if token.encode() in content(path)]


def content(path):
    return path.read_bytes() if path.is_file() else b""


def test_offline_reads_the_cache(hub, tmp_path):
    offline = {"HF_HUB_OFFLINE": "1"}
    (line,), _ = fetch(hub.endpoint, tmp_path, "lab/data", **offline)
    assert line.startswith("hub dataset lab/data at main: Cannot find an appropriate cached")
    assert "HF_HUB_OFFLINE" in line and "\n" not in line
    fetch(hub.endpoint, tmp_path, "lab/data")
    commit, requests = hub.commit(DATASET), len(hub.requests)
    for revision in ("main", commit):
        (result,), _ = fetch(hub.endpoint, tmp_path, "lab/data", revision=revision, **offline)
        check(result, commit)
    (line,), _ = fetch(hub.endpoint, tmp_path, "lab/data", revision="v2", **offline)
    assert line.startswith("hub dataset lab/data at v2: Cannot find an appropriate cached")
    assert len(hub.requests) == requests


OFFLINE = {"HF_HUB_OFFLINE": "1"}


def kept_lists(home):
    return list(home.glob("hub/*/snakechat/*.json"))


@pytest.fixture(params=["list", "no list", "damaged list"])
def filled(request, hub, tmp_path):
    """The folder of the files in a filled cache: with the kept list of the hub, without one, as
    another program fills it, and with a damaged one."""
    ((folder, *_),), _ = fetch(hub.endpoint, tmp_path, "lab/data")
    (path,) = kept_lists(tmp_path)
    if request.param == "no list":
        path.unlink()
    elif request.param == "damaged list":
        path.write_text('{"a.parquet": [3')
    return folder


@pytest.mark.parametrize(("name", "replaced"), [("a.parquet", False), ("folder/c.txt", True)])
def test_offline_rejects_an_edited_file_of_the_cache(hub, tmp_path, filled, name, replaced):
    path = os.path.join(filled, name)
    if replaced:
        # As an editor does that renames: the link to the file is gone.
        os.unlink(path)
    with open(path, "wb") as file:
        file.write(DATA[name][:-1] + b"!")
    (line,), _ = fetch(hub.endpoint, tmp_path, "lab/data", **OFFLINE)
    assert line.startswith(f"hub dataset lab/data at main: {path} was "), line
    assert line.endswith("run once without HF_HUB_OFFLINE to download it")
    assert "\n" not in line


def test_offline_reads_a_cache_that_another_program_filled(hub, tmp_path, filled):
    (result,), _ = fetch(hub.endpoint, tmp_path, "lab/data", **OFFLINE)
    check(result, hub.commit(DATASET))


BRANCHES = """
import json, sys
from snakechat.data.hub import moved_branches
from snakechat.workflow.errors import InputError
try:
    print(json.dumps(moved_branches(json.loads(sys.argv[1]))))
except InputError as error:
    print(json.dumps(f"{error}"))
"""


def branches_of(hub, results, **environment):
    environment = {"HF_ENDPOINT": hub.endpoint, "NO_PROXY": "127.0.0.1,localhost", **environment}
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts"), **environment}
    command = [sys.executable, "-c", BRANCHES, json.dumps(results)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(process.stdout)


def test_branches_that_moved_since_the_import_are_described(hub):
    hub.repositories["model/lab/model"] = DATA
    old, now = hub.commit(DATASET), "f" * 40
    hub.commit = lambda repository: now

    def result(rule, name, facts, **settings):
        return {"rule": rule, "name": name, "settings": settings}, facts

    mine = {"hub": "lab/data", "revision": "main"}
    model = {"hub": "lab/model", "revision": "main"}
    results = [
        result("import_dataset", "mine", {"commit": old}, **mine),
        result("import_dataset", "again", {"commit": now}, **mine),
        result("import_dataset", "pinned", {"commit": old}, hub="lab/data", revision=old),
        result("import_dataset", "not built", None, **mine),
        result("import_dataset", "local", {}, format="plain"),
        result("fetch_model", "opt", {"commit": old}, **model),
    ]
    after = "set revision to the first to keep the result, to the second to replace it"
    assert branches_of(hub, results) == [
        f"dataset mine: main of lab/data was {old} and is {now} now: {after}",
        f"model opt: main of lab/model was {old} and is {now} now: {after}",
    ]
    # Each branch is asked for once, and nothing is asked about commits.
    assert count_requests(hub, "lab/data") == count_requests(hub, "lab/model") == 1
    line = branches_of(hub, results, HF_HUB_OFFLINE="1")
    assert line.startswith("hub dataset lab/data at main: ") and "HF_HUB_OFFLINE" in line
