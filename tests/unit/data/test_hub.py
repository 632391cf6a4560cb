"""Downloads of models and datasets, from a local server that implements the hub's protocol."""

import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import INIT, ROOT, Workflow, copy_sources
from snakechat.data.hub import licence_of
from snakechat.modeling.models import copy_causal, make_causal, save_model
from snakechat.workflow.errors import InputError
from support.files import as_parquet
from support.hub import ELSEWHERE, name_of, serving


def torch_bytes(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def preferences(name, number):
    return [
        {
            "prompt": f"\n\nHuman: {name} {n}?\n\nAssistant:",
            "chosen": f" {n}.",
            "rejected": " No.",
        }
        for n in range(number)
    ]


TRAIN = [preferences("first", 25), preferences("second", 15)]
EVAL = preferences("eval", 7)
PAIRS = {
    "README.md": b"---\nlicense: mit\n---\n# Pairs\n",
    "data/train-00000-of-00002.parquet": as_parquet(TRAIN[0]),
    "data/train-00001-of-00002.parquet": as_parquet(TRAIN[1]),
    "data/test-00000-of-00001.parquet": as_parquet(EVAL),
    "top.parquet": as_parquet(preferences("top", 3)),
}


class Payload:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture(scope="module")
def model(tokenizer):
    """A tiny model and its tokenizer."""
    return make_causal(INIT, tokenizer, 1), tokenizer


@pytest.fixture(scope="module")
def models(model, tmp_path_factory):
    """Return {repository: {file: bytes}} of the models, and the folder that Payload creates."""
    folder = tmp_path_factory.mktemp("served")
    save_model(*model, folder)
    safe = {path.name: path.read_bytes() for path in folder.iterdir()}
    bare = {name: data for name, data in safe.items() if name != "model.safetensors"}
    weights = model[0].state_dict()
    # The names in OPT's files on the hub: those of the model without its tied head.
    headless = {
        name.removeprefix("model."): tensor
        for name, tensor in weights.items()
        if name != "lm_head.weight"
    }
    harmful = {**weights, "payload": Payload(folder / "ran")}
    # Must not be downloaded: these files contain no weights.
    useless = {"tf_model.h5": b"", "onnx/config.json": b"", "onnx/model.safetensors": b""}
    template = {"chat_template.jinja": b"{{ messages[0].content }}"}
    repositories = {
        "model/lab/safe": {**safe, **template, **useless, "pytorch_model.bin": b""},
        "model/lab/torch": {**bare, **useless, "pytorch_model.bin": torch_bytes(headless)},
        "model/lab/harmful": {**bare, "pytorch_model.bin": torch_bytes(harmful)},
        "model/lab/short": {**safe, "model.safetensors": safe["model.safetensors"][:-9]},
    }
    return repositories, folder / "ran"


# --- fetch, in a subprocess because huggingface_hub reads its environment on import ----------

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


def test_large_file_survives_more_drops_than_retries(hub, tmp_path):
    # Each response sends half of the missing bytes.
    hub.faults[DATASET] = "halves"
    (result,), _ = fetch(hub.endpoint, tmp_path, "lab/data", before=NO_WAITS)
    check(result, hub.commit(DATASET))
    loads = hub.loads(DATASET)
    check_resumed(loads)
    assert len(loads["a.parquet"]) > 8


def test_hub_without_support_for_ranges(hub, tmp_path):
    hub.faults[DATASET] = "whole"
    (result,), _ = fetch(hub.endpoint, tmp_path, "lab/data", before=NO_WAITS)
    check(result, hub.commit(DATASET))
    assert max(map(len, hub.loads(DATASET).values())) == 2


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


def test_silent_connection_times_out_and_is_resumed(hub, tmp_path):
    hub.faults[f"{DATASET}/a.parquet"] = "stall"
    (result,), err = fetch(hub.endpoint, tmp_path, "lab/data", HF_HUB_DOWNLOAD_TIMEOUT="1")
    check(result, hub.commit(DATASET))
    check_resumed(hub.loads(DATASET))
    assert "timed out" in err


def test_requests_to_a_busy_hub_are_retried(hub, tmp_path):
    hub.faults[DATASET] = "busy"
    (result,), err = fetch(hub.endpoint, tmp_path, "lab/data", before=NO_WAITS)
    check(result, hub.commit(DATASET))
    assert re.search("500 Internal Server Error.*: next attempt in 1 s", err)
    assert re.search("429 Too Many Requests.*: next attempt in 2 s", err)
    # huggingface_hub waits as long as the hub requests.
    assert "Rate limited. Waiting 56.0s" in err


def test_waits_between_retries_double(hub, tmp_path):
    hub.faults[DATASET] = "list"
    (line,), err = fetch(hub.endpoint, tmp_path, "lab/data", before=NO_WAITS)
    assert "500 Internal Server Error" in line
    waits = [int(wait) for wait in re.findall(r"next attempt in (.*) s", err)]
    assert waits == [1, 2, 4, 8, 16, 32, 64]
    assert count_requests(hub, "lab/data") == len(waits) + 1


def test_two_processes_download_a_file_once(hub, tmp_path):
    hub.faults[DATASET] = "stall"
    processes = [start(hub.endpoint, tmp_path, "lab/data") for _ in range(2)]
    until = time.monotonic() + 30
    while len([r for r in hub.requests if "/api/" in r.path]) < 2:
        assert time.monotonic() < until
        time.sleep(0.02)
    time.sleep(0.5)
    hub.thaw.set()
    hub.faults.clear()
    for process in processes:
        out, _ = process.communicate(timeout=60)
        check(json.loads(out), hub.commit(DATASET))
    check_resumed(hub.loads(DATASET))


def test_damaged_file_is_downloaded_again(hub, tmp_path):
    hub.faults[DATASET] = "damaged once"
    (result,), _ = fetch(hub.endpoint, tmp_path, "lab/data")
    check(result, hub.commit(DATASET))
    for name, loads in hub.loads(DATASET).items():
        assert loads == [(0, len(DATA[name]))] * (2 if DATA[name] else 1), name


def test_damaged_file_in_the_cache_is_downloaded_again(hub, tmp_path):
    (result,), _ = fetch(hub.endpoint, tmp_path, "lab/data")
    for name, data in (("a.parquet", DATA["a.parquet"][:-1]), ("folder/c.txt", b"other\n")):
        with open(os.path.join(result[0], name), "wb") as file:
            file.write(data)
    (result,), _ = fetch(hub.endpoint, tmp_path, "lab/data")
    check(result, hub.commit(DATASET))
    loads = hub.loads(DATASET)
    assert {name for name in loads if len(loads[name]) == 2} == {"a.parquet", "folder/c.txt"}


@pytest.mark.parametrize("name", ["a.parquet", "folder/c.txt"])
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
        "lab/file": "500 Internal Server Error",
        "lab/head": "500 Internal Server Error",
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


def test_revision_that_does_not_exist(hub, tmp_path):
    (line,), _ = fetch(hub.endpoint, tmp_path, "lab/data", revision="v2")
    assert re.match("hub dataset lab/data at v2: 404 .*Revision Not Found", line)
    assert count_requests(hub, "lab/data") == 1


def test_hub_that_is_unreachable(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
    (line,), _ = fetch(endpoint, tmp_path, "lab/data", before=NO_WAITS)
    assert re.match("hub dataset lab/data at main: .*refused", line)


def test_errors_of_choose_propagate(hub, tmp_path):
    before = "def choose(paths): raise InputError(f'none of {len(paths)} files')"
    (line,), _ = fetch(hub.endpoint, tmp_path, "lab/data", before=before)
    assert line == f"none of {len(DATA)} files"


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


def test_offline_rejects_an_incomplete_revision(hub, tmp_path):
    hub.faults[f"{DATASET}/b.parquet"] = "file"
    (line,), _ = fetch(hub.endpoint, tmp_path, "lab/data", before=NO_WAITS)
    assert "500 Internal Server Error" in line
    assert name_of("a.parquet", DATA["a.parquet"]) in cached(tmp_path)
    (line,), _ = fetch(hub.endpoint, tmp_path, "lab/data", HF_HUB_OFFLINE="1")
    assert "Cannot find an appropriate cached" in line


# --- builds ---------------------------------------------------------------------------------

MODELS = {
    # Name in the config: repository, revision.
    "safe": ("lab/safe", "main"),
    "torch": ("lab/torch", "main"),
    "harmful": ("lab/harmful", "main"),
    "short": ("lab/short", "main"),
    "unknown": ("lab/unknown", "main"),
}
GLOBS = {"train": "data/train-*.parquet", "eval": "data/test-*.parquet"}
DATASETS = {
    # Name in the config: repository, revision, globs.
    "both": ("lab/pairs", "main", GLOBS),
    "train": ("lab/pairs", "main", {"train": GLOBS["train"]}),
    "deep": ("lab/pairs", "main", {"train": "**/*.parquet"}),
    "nothing": ("lab/pairs", "main", {**GLOBS, "eval": "data/dev-*.parquet"}),
    "revision": ("lab/pairs", "v2", GLOBS),
    "damaged": ("lab/damaged", "main", GLOBS),
}


def config_of(models, datasets):
    return {
        "models": {name: {"hub": hub, "revision": at} for name, (hub, at) in models.items()},
        "datasets": {
            name: {"hub": hub, "revision": at, "format": "plain", **globs}
            for name, (hub, at, globs) in datasets.items()
        },
    }


@pytest.fixture(scope="module")
def served(models):
    """A hub that serves MODELS and DATASETS, except for those that do not exist."""
    with serving() as hub:
        hub.repositories, hub.marker = models
        for name, fault in (("pairs", "drop"), ("damaged", "damaged")):
            hub.repositories[f"dataset/lab/{name}"] = PAIRS
            hub.faults[f"dataset/lab/{name}"] = fault
        hub.faults["model/lab/safe"] = "drop"
        yield hub


@pytest.fixture(scope="module")
def built(served, tmp_path_factory):
    """A workflow that has built all models and datasets at once, and Snakemake's process."""
    folder = tmp_path_factory.mktemp("hub")
    copy_sources(folder)
    (folder / "mine.yaml").write_text(yaml.safe_dump(config_of(MODELS, DATASETS)))
    workflow = Workflow(folder, "--configfile", "mine.yaml")
    workflow.environment = {"HF_ENDPOINT": served.endpoint, "HF_HOME": str(folder / "home")}
    workflow.environment |= {"HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1,localhost"}
    targets = [f"output/models/{name}.manifest.json" for name in MODELS]
    targets += [f"output/data/{name}.manifest.json" for name in DATASETS]
    return workflow, workflow.snakemake(*targets, "--keep-going", "--cores", "2")


def error_of(workflow, rule, name):
    """Return the error message of a failed job, which is one line of its log."""
    log = (workflow.folder / f"output/logs/{rule}/{name}.log").read_text()
    assert "Traceback" not in log
    (line,) = [line for line in log.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


def names(folder):
    return {path.name for path in folder.iterdir()}


def rows(path):
    return pq.read_table(path).to_pylist()


@pytest.mark.parametrize("name", ["safe", "torch"])
def test_model_is_stored_as_safetensors(built, served, model, name):
    workflow, process = built
    folder = workflow.folder / "output/models" / name
    assert folder.exists(), process.stdout
    assert "model.safetensors" in names(folder)
    assert not [file for file in names(folder) if file.endswith((".bin", ".h5", ".pt"))]
    manifest = json.loads((workflow.folder / f"output/models/{name}.manifest.json").read_text())
    assert manifest["facts"]["commit"] == served.commit(f"model/lab/{name}")
    # The repositories have no card.
    assert manifest["facts"]["licence"] is None
    weights, tokenizer = model
    arrived = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert arrived.keys() == weights.state_dict().keys()
    assert all(torch.equal(arrived[key], tensor) for key, tensor in weights.state_dict().items())
    text = "\n\nHuman: Name 2 fruits.\n\nAssistant:"
    assert AutoTokenizer.from_pretrained(folder)(text) == tokenizer(text)


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: cc-by-4.0\n---\n# Mine", "cc-by-4.0"),
        ("# Mine", None),
        ("---\ntags: [a]\n---\n", None),
        ("---\nlicense: [mit, opt]\n---\n", None),
        ("---\nlicense: [mit\n---\n", None),
        ("---\n- mit\n---\n", None),
        ("---\nlicense: 'mit | [x](http://x)'\n---\n", None),
    ],
)
def test_licence_is_read_from_the_card_if_it_is_a_word(tmp_path, card, licence):
    assert licence_of(tmp_path) is None
    (tmp_path / "README.md").write_text(card)
    assert licence_of(tmp_path) == licence


def test_chat_template_is_stored(built):
    tokenizer = AutoTokenizer.from_pretrained(built[0].folder / "output/models/safe")
    dialogue = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(dialogue, tokenize=False) == "Hello"


def test_only_required_files_are_downloaded(built, served):
    loads = {name: served.loads(name) for name in served.repositories}
    fetched = {file for files in loads.values() for file in files}
    assert {"config.json", "model.safetensors", "pytorch_model.bin"} <= fetched
    assert not fetched & {"tf_model.h5", "onnx/config.json", "onnx/model.safetensors"}
    assert "pytorch_model.bin" not in loads["model/lab/safe"]


def test_builds_download_each_file_over_connections_that_drop(built, served):
    loads = [
        ranges
        for name in ("model/lab/safe", "dataset/lab/pairs")
        for ranges in served.loads(name).values()
    ]
    assert sum(len(ranges) - 1 for ranges in loads) >= 2


def test_dataset_is_imported(built, served):
    workflow, process = built
    folder = workflow.folder / "output/data/both"
    assert folder.exists(), process.stdout
    assert rows(folder / "train.parquet") == TRAIN[0] + TRAIN[1]
    assert rows(folder / "eval.parquet") == EVAL
    manifest = json.loads((workflow.folder / "output/data/both.manifest.json").read_text())
    assert manifest["facts"]["commit"] == served.commit("dataset/lab/pairs")
    assert manifest["facts"]["licence"] == "mit"


def test_dataset_without_eval_keeps_all_rows(built):
    folder = built[0].folder / "output/data/train"
    assert rows(folder / "train.parquet") == TRAIN[0] + TRAIN[1]
    assert "eval.parquet" not in names(folder)


def test_glob_matches_as_in_a_local_folder(built):
    folder = built[0].folder / "output/data/deep"
    prompts = {row["prompt"].split()[1] for row in rows(folder / "train.parquet")}
    assert prompts == {"first", "second", "eval", "top"}


FAILURES = {
    (
        "fetch_model",
        "harmful",
    ): "hub model lab/harmful at COMMIT: the weights file is damaged or has",
    ("fetch_model", "short"): "hub model lab/short at COMMIT: .",
    ("fetch_model", "unknown"): "hub model lab/unknown at main: 404 .*Repository Not Found",
    (
        "import_dataset",
        "nothing",
    ): "hub dataset lab/pairs: eval: no file matches 'data/dev-[*].parquet'",
    ("import_dataset", "revision"): "hub dataset lab/pairs at v2: 404 .*Revision Not Found",
    ("import_dataset", "damaged"): "hub dataset lab/damaged at main: data/.*parquet is damaged: ",
}
FOLDERS = {"fetch_model": "output/models", "import_dataset": "output/data"}


@pytest.mark.parametrize(("rule", "name"), FAILURES)
def test_failed_download_is_one_error_line_without_a_result(built, rule, name):
    workflow, process = built
    assert process.returncode == 1
    line = re.sub(r"\b[0-9a-f]{40}\b", "COMMIT", error_of(workflow, rule, name))
    assert re.match(FAILURES[rule, name], line), line
    left = [path for path in names(workflow.folder / FOLDERS[rule]) if path.startswith(name)]
    assert left == []


def test_pickled_objects_in_weights_are_not_run(built, served):
    assert "lab/harmful" in error_of(built[0], "fetch_model", "harmful")
    assert not served.marker.exists()
    # Unpickling the object would have created the folder.
    make, arguments = Payload(served.marker).__reduce__()
    make(*arguments)
    assert served.marker.exists()
    served.marker.rmdir()


def test_missing_weights_are_an_error(model, tmp_path):
    save_model(*model, tmp_path)
    weights = {key: t for key, t in model[0].state_dict().items() if "layers.1.fc2" not in key}
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"weights are missing: model.decoder.layers.1.fc2.bias, "):
        copy_causal(tmp_path, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_next_build_succeeds_after_a_failure(built, served, monkeypatch):
    monkeypatch.setattr(served, "faults", {})
    workflow = built[0]
    process = workflow.snakemake("output/data/damaged.manifest.json", "--cores", "2")
    assert process.returncode == 0, process.stdout
    assert rows(workflow.folder / "output/data/damaged/eval.parquet") == EVAL
    assert ".damaged.tmp" not in names(workflow.folder / "output/data")


def test_offline_build_reads_the_cache(built, served):
    folder = built[0].folder
    models = {"again": ("lab/torch", "main")}
    datasets = {"again": ("lab/pairs", "main", GLOBS), "never": ("lab/never", "main", GLOBS)}
    (folder / "offline.yaml").write_text(yaml.safe_dump(config_of(models, datasets)))
    workflow = Workflow(folder, "--configfile", "offline.yaml")
    workflow.environment = {**built[0].environment, "HF_HUB_OFFLINE": "1"}
    requests = len(served.requests)
    process = workflow.snakemake(
        "output/models/again.manifest.json",
        "output/data/again.manifest.json",
        "output/data/never.manifest.json",
        *("--keep-going", "--cores", "2"),
    )
    assert process.returncode == 1
    assert len(served.requests) == requests
    for result, name in (("models/again", "models/torch"), ("data/again", "data/both")):
        files = names(folder / "output" / name) - {"manifest.json"}
        assert files == names(folder / "output" / result) - {"manifest.json"}, process.stdout
        for file in files:
            online = (folder / "output" / name / file).read_bytes()
            assert (folder / "output" / result / file).read_bytes() == online
        facts = [
            json.loads((folder / f"output/{path}/manifest.json").read_text())["facts"]
            for path in (result, name)
        ]
        assert facts[0] == facts[1]
    line = error_of(workflow, "import_dataset", "never")
    assert line.startswith("hub dataset lab/never at main: Cannot find an appropriate cached")
