"""Models and datasets of the hub, from a small hub on this machine, well and ill."""

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
    """An object whose unpickling makes a folder."""

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
    """Files of the models that the hub serves, and what a harmful one would make."""
    folder = tmp_path_factory.mktemp("served")
    save_model(*model, folder)
    safe = {path.name: path.read_bytes() for path in folder.iterdir()}
    bare = {name: data for name, data in safe.items() if name != "model.safetensors"}
    weights = model[0].state_dict()
    # Named as in the files of OPT on the hub: of the model without its head, which is tied.
    headless = {
        name.removeprefix("model."): tensor
        for name, tensor in weights.items()
        if name != "lm_head.weight"
    }
    harmful = {**weights, "payload": Payload(folder / "ran")}
    # What is not needed must not be fetched: these weights are no weights.
    useless = {"tf_model.h5": b"", "onnx/config.json": b"", "onnx/model.safetensors": b""}
    template = {"chat_template.jinja": b"{{ messages[0].content }}"}
    repositories = {
        "model/lab/safe": {**safe, **template, **useless, "pytorch_model.bin": b""},
        "model/lab/torch": {**bare, **useless, "pytorch_model.bin": torch_bytes(headless)},
        "model/lab/harmful": {**bare, "pytorch_model.bin": torch_bytes(harmful)},
        "model/lab/short": {**safe, "model.safetensors": safe["model.safetensors"][:-9]},
    }
    return repositories, folder / "ran"


# A file from the hub into the cache: fetch alone, in a process of its own for each environment.

DATA = {
    "a.parquet": random.Random(1).randbytes(3_000_000),
    "b.parquet": random.Random(2).randbytes(100_000),
    "folder/c.txt": b"a small file, which git keeps\n",
    "folder/empty.txt": b"",
    "not_asked_for.bin": b"0" * 100,
}
ASKED = [name for name in DATA if name != "not_asked_for.bin"]

PROGRAM = """
import json, sys, time
import snakechat.data.hub
from snakechat.workflow.errors import InputError

def choose(paths):
    return [path for path in paths if not path.startswith("not_")]

BEFORE
for repository in sys.argv[2:]:
    try:
        folder, paths, commit = rlhf.hub.fetch(repository, "dataset", sys.argv[1], choose)
        print(json.dumps([str(folder), paths, commit]))
    except InputError as error:
        print(json.dumps(f"{error}"))
"""
IMPATIENT = "time.sleep = lambda seconds: None"


def start(endpoint, home, *repositories, revision="main", before="", **environment):
    """A process that fetches from each repository, into the cache at home."""
    inherited = {key: os.environ[key] for key in os.environ if not key.startswith("HF_")}
    local = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1,localhost"}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("BEFORE", before), revision, *repositories],
        env={**inherited, **local, "PYTHONPATH": str(ROOT / "scripts"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ask(*arguments, **options):
    """What fetch said of each repository, and what stood on standard error."""
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()], err


def check(result, commit, files=DATA, paths=ASKED):
    """All that was asked for is in the folder, byte for byte."""
    folder, found, at = result
    assert (found, at) == (sorted(paths), commit)
    for name in paths:
        with open(os.path.join(folder, name), "rb") as file:
            assert file.read() == files[name], name


def cached(home):
    """Names of the blobs in the cache."""
    return {path.name for path in home.glob("hub/*/blobs/*")}


def asked_of(hub, name):
    """Number of requests for a repository. huggingface_hub has others, of its own."""
    return len([request for request in hub.requests if name in request.path])


def check_no_byte_twice(loads, files=DATA):
    """Each response with a file began where the one before had ended."""
    for name, parts in loads.items():
        assert parts[0][0] == 0 and parts[-1][1] == len(files[name]), name
        assert all(before[1] == after[0] for before, after in pairwise(parts)), name


@pytest.fixture
def hub():
    """A hub with one dataset."""
    with serving() as hub:
        hub.repositories = {"dataset/lab/data": DATA}
        yield hub


DATASET = "dataset/lab/data"


def test_files_arrive_once_and_come_from_the_cache_then(hub, tmp_path):
    for _ in range(2):
        (result,), err = ask(hub.endpoint, tmp_path, "lab/data")
        check(result, hub.commit(DATASET))
        assert err == ""
        # A file without bytes need not be asked for.
        whole = {name: [(0, len(DATA[name]))] for name in ASKED if DATA[name]}
        assert hub.loads(DATASET) == whole


def test_dropped_connections_cost_no_byte(hub, tmp_path):
    hub.faults[DATASET] = "drop"
    (result,), err = ask(hub.endpoint, tmp_path, "lab/data")
    check(result, hub.commit(DATASET))
    loads = hub.loads(DATASET)
    check_no_byte_twice(loads)
    assert sum(map(len, loads.values())) > len(loads)
    assert "again in 0.25 s" in err


def test_large_file_gets_through_any_number_of_drops(hub, tmp_path):
    # Each response brings half of what is missing: far more of them than attempts in vain.
    before = IMPATIENT + "; rlhf.hub.ATTEMPTS = 2"
    hub.faults[DATASET] = "halves"
    (result,), err = ask(hub.endpoint, tmp_path, "lab/data", before=before)
    check(result, hub.commit(DATASET))
    loads = hub.loads(DATASET)
    check_no_byte_twice(loads)
    assert len(loads["a.parquet"]) > 10
    # Each attempt was fruitful, so no wait was longer than the first.
    assert set(re.findall(r"again in (.*) s", err)) == {"0.25"}


def test_hub_without_ranges(hub, tmp_path):
    hub.faults[DATASET] = "whole"
    (result,), _ = ask(hub.endpoint, tmp_path, "lab/data", before=IMPATIENT)
    check(result, hub.commit(DATASET))
    assert max(map(len, hub.loads(DATASET).values())) == 2


def test_killed_download_goes_on(hub, tmp_path):
    hub.faults[DATASET] = "stall"
    process = start(hub.endpoint, tmp_path, "lab/data")
    half = len(DATA["a.parquet"]) // 2
    until = time.monotonic() + 30
    while sum(path.stat().st_size for path in tmp_path.rglob("*.incomplete")) < half:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hub.faults.clear()
    (result,), _ = ask(hub.endpoint, tmp_path, "lab/data")
    check(result, hub.commit(DATASET))
    assert hub.loads(DATASET)["a.parquet"] == [(0, half), (half, 2 * half)]
    assert cached(tmp_path) == {name_of(name, DATA[name]) for name in ASKED}


def test_silent_connection_is_given_up(hub, tmp_path):
    hub.faults[DATASET] = "stall"
    (result,), err = ask(
        hub.endpoint, tmp_path, "lab/data", before="snakechat.data.hub.TIMEOUT = 0.3"
    )
    check(result, hub.commit(DATASET))
    check_no_byte_twice(hub.loads(DATASET))
    assert "timed out" in err


def test_busy_hub_is_asked_again(hub, tmp_path):
    hub.faults[DATASET] = "busy"
    (result,), err = ask(hub.endpoint, tmp_path, "lab/data", before=IMPATIENT)
    check(result, hub.commit(DATASET))
    waits = re.findall(r"(500 Internal Server Error|429 Too Many Requests).*; again in (.*) s", err)
    assert waits[:2] == [("500 Internal Server Error", "0.25"), ("429 Too Many Requests", "55")]
    assert {wait for status, wait in waits if status.startswith("429")} == {"55"}


def test_waits_double(hub, tmp_path):
    hub.faults[DATASET] = "list"
    (line,), err = ask(hub.endpoint, tmp_path, "lab/data", before=IMPATIENT)
    assert "500 Internal Server Error" in line
    waits = [float(wait) for wait in re.findall(r"again in (.*) s", err)]
    assert waits[0] <= 0.5 and 60 <= sum(waits) <= 300
    assert all(after == 2 * before for before, after in pairwise(waits))
    assert asked_of(hub, "lab/data") == len(waits) + 1


def test_two_processes_load_a_file_once(hub, tmp_path):
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
    check_no_byte_twice(hub.loads(DATASET))


def test_damaged_file_is_fetched_again(hub, tmp_path):
    hub.faults[DATASET] = "damaged once"
    (result,), _ = ask(hub.endpoint, tmp_path, "lab/data")
    check(result, hub.commit(DATASET))
    for name, loads in hub.loads(DATASET).items():
        assert loads == [(0, len(DATA[name]))] * 2


def test_damage_in_the_cache_is_found(hub, tmp_path):
    (result,), _ = ask(hub.endpoint, tmp_path, "lab/data")
    for name, data in (("a.parquet", DATA["a.parquet"][:-1]), ("folder/c.txt", b"other\n")):
        with open(os.path.join(result[0], name), "wb") as file:
            file.write(data)
    (result,), _ = ask(hub.endpoint, tmp_path, "lab/data")
    check(result, hub.commit(DATASET))
    loads = hub.loads(DATASET)
    assert {name for name in loads if len(loads[name]) == 2} == {"a.parquet", "folder/c.txt"}


def test_damaged_start_of_a_file_is_thrown_away(hub, tmp_path):
    blobs = tmp_path / "hub/datasets--lab--data/blobs"
    blobs.mkdir(parents=True)
    for name, junk in (("a.parquet", 1_000_000), ("folder/c.txt", 1_000)):
        (blobs / f"{name_of(name, DATA[name])}.incomplete").write_bytes(b"?" * junk)
    (result,), _ = ask(hub.endpoint, tmp_path, "lab/data")
    check(result, hub.commit(DATASET))
    assert hub.loads(DATASET)["a.parquet"] == [(1_000_000, 3_000_000), (0, 3_000_000)]


@pytest.mark.parametrize("name", ["a.parquet", "folder/c.txt"])
def test_file_that_stays_damaged_is_refused(hub, tmp_path, name):
    files = {name: DATA[name], "other.txt": b"other"}
    hub.repositories[DATASET] = files
    hub.faults[DATASET] = "damaged"
    (line,), _ = ask(hub.endpoint, tmp_path, "lab/data")
    digest, size = name_of(name, DATA[name]), len(DATA[name])
    told = f"hub dataset lab/data at main: {name} is damaged: expected {size} bytes with digest"
    assert line.startswith(f"{told} {digest}, found {size} bytes with digest ")
    assert len(hub.loads(DATASET)[name]) == 2
    assert not cached(tmp_path)
    assert not [path for path in tmp_path.glob("hub/*/snapshots/**/*") if not path.is_dir()]


def test_what_the_hub_refuses_is_told_at_once(hub, tmp_path):
    faults = {
        "lab/list": "500 Internal Server Error",
        "lab/file": "500 Internal Server Error",
        "lab/head": "500 Internal Server Error",
        "lab/cut": "peer closed connection",
        "lab/html": "Expecting value: line 1 column 1",
        "lab/bare": "a.parquet is listed without its size and digest",
        "lab/forbidden": "403 Forbidden: not for you",
    }
    for name in faults:
        hub.repositories[f"dataset/{name}"] = DATA
        hub.faults[f"dataset/{name}"] = name.partition("/")[2]
    refused = {
        "lab/unknown": "404 Client Error. .*Repository Not Found",
        "lab/no--name": "Cannot have -- or .. in repo_id",
    }
    cases = faults | refused
    lines, _ = ask(hub.endpoint, tmp_path, *cases, before=IMPATIENT)
    assert len(lines) == len(cases), lines
    for line, (name, reason) in zip(lines, cases.items(), strict=True):
        assert re.match(f"hub dataset {name} at main: .*{reason}", line), line
        assert "\n" not in line
    assert asked_of(hub, "lab/forbidden") == asked_of(hub, "lab/unknown") == 1


def test_revision_that_does_not_exist(hub, tmp_path):
    (line,), _ = ask(hub.endpoint, tmp_path, "lab/data", revision="v2")
    assert re.match("hub dataset lab/data at v2: 404 .*Revision Not Found", line)
    assert asked_of(hub, "lab/data") == 1


def test_hub_that_is_not_there(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
    (line,), _ = ask(endpoint, tmp_path, "lab/data", before=IMPATIENT)
    assert re.match("hub dataset lab/data at main: .*refused", line)


def test_what_choose_raises_passes(hub, tmp_path):
    before = "def choose(paths): raise InputError(f'none of {len(paths)} files will do')"
    (line,), _ = ask(hub.endpoint, tmp_path, "lab/data", before=before)
    assert line == f"none of {len(DATA)} files will do"


def test_token_goes_to_the_hub_and_nowhere_else(hub, tmp_path):
    hub.tokens[DATASET] = token = "hf_onlythehubmayseeit"
    (line,), _ = ask(hub.endpoint, tmp_path, "lab/data")
    assert re.match("hub dataset lab/data at main: .*401 .*Invalid username or password", line)
    assert asked_of(hub, "lab/data") == 1
    hub.faults[DATASET], asked = "busy", len(hub.requests)
    (result,), err = ask(hub.endpoint, tmp_path, "lab/data", before=IMPATIENT, HF_TOKEN=token)
    check(result, hub.commit(DATASET))
    asked = [request for request in hub.requests[asked:] if "lab/data" in request.path]
    elsewhere = [request for request in asked if request.path.startswith(ELSEWHERE)]
    assert elsewhere and {request.token for request in elsewhere} == {None}
    at_hub = [request for request in asked if request not in elsewhere]
    assert {request.token for request in at_hub} == {f"Bearer {token}"}
    hub.faults[DATASET] = "forbidden"
    (line,), more = ask(hub.endpoint, tmp_path, "lab/data", HF_TOKEN=token)
    assert "403" in line and token not in line + err + more
    assert not [path for path in tmp_path.rglob("*") if token.encode() in content(path)]


def content(path):
    return path.read_bytes() if path.is_file() else b""


def test_offline(hub, tmp_path):
    offline = {"HF_HUB_OFFLINE": "1"}
    (line,), _ = ask(hub.endpoint, tmp_path, "lab/data", **offline)
    assert line.startswith("hub dataset lab/data at main: Cannot find an appropriate cached")
    assert "HF_HUB_OFFLINE" in line and "\n" not in line
    ask(hub.endpoint, tmp_path, "lab/data")
    commit, asked = hub.commit(DATASET), len(hub.requests)
    for revision in ("main", commit):
        (result,), _ = ask(hub.endpoint, tmp_path, "lab/data", revision=revision, **offline)
        check(result, commit)
    (line,), _ = ask(hub.endpoint, tmp_path, "lab/data", revision="v2", **offline)
    assert line.startswith("hub dataset lab/data at v2: Cannot find an appropriate cached")
    assert len(hub.requests) == asked


def test_offline_does_not_take_half_of_a_revision(hub, tmp_path):
    hub.faults[f"{DATASET}/b.parquet"] = "file"
    (line,), _ = ask(hub.endpoint, tmp_path, "lab/data", before=IMPATIENT)
    assert "500 Internal Server Error" in line
    assert name_of("a.parquet", DATA["a.parquet"]) in cached(tmp_path)
    (line,), _ = ask(hub.endpoint, tmp_path, "lab/data", HF_HUB_OFFLINE="1")
    assert "Cannot find an appropriate cached" in line


# Whole builds.

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
    """A hub that serves the repositories of MODELS and DATASETS which exist."""
    with serving() as hub:
        hub.repositories, hub.marker = models
        for name, fault in (("pairs", "drop"), ("damaged", "damaged")):
            hub.repositories[f"dataset/lab/{name}"] = PAIRS
            hub.faults[f"dataset/lab/{name}"] = fault
        hub.faults["model/lab/safe"] = "drop"
        yield hub


@pytest.fixture(scope="module")
def built(served, tmp_path_factory):
    """A workflow in which everything was asked of the hub at once, and Snakemake's process."""
    folder = tmp_path_factory.mktemp("hub")
    copy_sources(folder)
    (folder / "mine.yaml").write_text(yaml.safe_dump(config_of(MODELS, DATASETS)))
    workflow = Workflow(folder, "--configfile", "mine.yaml")
    workflow.environment = {"HF_ENDPOINT": served.endpoint, "HF_HOME": str(folder / "home")}
    workflow.environment |= {"HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1,localhost"}
    targets = [f"output/models/{name}.manifest.json" for name in MODELS]
    targets += [f"output/data/{name}.manifest.json" for name in DATASETS]
    return workflow, workflow.snakemake(*targets, "--keep-going", "--cores", "2")


def told(workflow, rule, name):
    """The one line with which a job failed, after "error: "."""
    log = (workflow.folder / f"output/logs/{rule}/{name}.log").read_text()
    assert "Traceback" not in log
    (line,) = [line for line in log.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


def names(folder):
    return {path.name for path in folder.iterdir()}


def rows(path):
    return pq.read_table(path).to_pylist()


@pytest.mark.parametrize("name", ["safe", "torch"])
def test_model_arrives_as_safetensors(built, served, model, name):
    workflow, process = built
    folder = workflow.folder / "output/models" / name
    assert folder.exists(), process.stdout
    assert "model.safetensors" in names(folder)
    assert not [file for file in names(folder) if file.endswith((".bin", ".h5", ".pt"))]
    manifest = json.loads((workflow.folder / f"output/models/{name}.manifest.json").read_text())
    assert manifest["facts"]["commit"] == served.commit(f"model/lab/{name}")
    # Their repositories have no card.
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
def test_a_licence_is_a_word_of_the_card(tmp_path, card, licence):
    assert licence_of(tmp_path) is None
    (tmp_path / "README.md").write_text(card)
    assert licence_of(tmp_path) == licence


def test_chat_template_arrives(built):
    tokenizer = AutoTokenizer.from_pretrained(built[0].folder / "output/models/safe")
    dialogue = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(dialogue, tokenize=False) == "Hello"


def test_nothing_is_fetched_that_is_not_needed(built, served):
    loads = {name: served.loads(name) for name in served.repositories}
    fetched = {file for files in loads.values() for file in files}
    assert {"config.json", "model.safetensors", "pytorch_model.bin"} <= fetched
    assert not fetched & {"tf_model.h5", "onnx/config.json", "onnx/model.safetensors"}
    assert "pytorch_model.bin" not in loads["model/lab/safe"]


def test_builds_load_a_file_once_over_connections_that_drop(built, served):
    broken = 0
    for name in ("model/lab/safe", "dataset/lab/pairs"):
        loads = served.loads(name)
        check_no_byte_twice(loads, served.repositories[name])
        broken += sum(len(parts) - 1 for parts in loads.values())
    assert broken >= 2


def test_dataset_arrives(built, served):
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


def test_glob_means_the_same_as_in_a_local_folder(built):
    folder = built[0].folder / "output/data/deep"
    prompts = {row["prompt"].split()[1] for row in rows(folder / "train.parquet")}
    assert prompts == {"first", "second", "eval", "top"}


FAILURES = {
    ("fetch_model", "harmful"): "hub model lab/harmful at COMMIT: weights that are more than",
    ("fetch_model", "short"): "hub model lab/short at COMMIT: .",
    ("fetch_model", "unknown"): "hub model lab/unknown at main: 404 .*Repository Not Found",
    ("import_dataset", "nothing"): "lab/pairs: .*eval.* file matches 'data/dev-[*].parquet'",
    ("import_dataset", "revision"): "hub dataset lab/pairs at v2: 404 .*Revision Not Found",
    ("import_dataset", "damaged"): "hub dataset lab/damaged at main: data/.*parquet is damaged: ",
}
FOLDERS = {"fetch_model": "output/models", "import_dataset": "output/data"}


@pytest.mark.parametrize(("rule", "name"), FAILURES)
def test_failure_is_told_in_one_line_and_leaves_no_result(built, rule, name):
    workflow, process = built
    assert process.returncode == 1
    line = re.sub(r"\b[0-9a-f]{40}\b", "COMMIT", told(workflow, rule, name))
    assert re.match(FAILURES[rule, name], line), line
    left = [path for path in names(workflow.folder / FOLDERS[rule]) if path.startswith(name)]
    assert left == []


def test_weights_that_hide_an_object_run_nothing(built, served):
    assert "lab/harmful" in told(built[0], "fetch_model", "harmful")
    assert not served.marker.exists()
    # What loading was to run would have made it.
    make, arguments = Payload(served.marker).__reduce__()
    make(*arguments)
    assert served.marker.exists()
    served.marker.rmdir()


def test_weights_that_are_missing_are_not_made_up(model, tmp_path):
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


def test_build_offline_takes_what_is_in_the_cache(built, served):
    folder = built[0].folder
    models = {"again": ("lab/torch", "main")}
    datasets = {"again": ("lab/pairs", "main", GLOBS), "never": ("lab/never", "main", GLOBS)}
    (folder / "offline.yaml").write_text(yaml.safe_dump(config_of(models, datasets)))
    workflow = Workflow(folder, "--configfile", "offline.yaml")
    workflow.environment = {**built[0].environment, "HF_HUB_OFFLINE": "1"}
    asked = len(served.requests)
    process = workflow.snakemake(
        "output/models/again.manifest.json",
        "output/data/again.manifest.json",
        "output/data/never.manifest.json",
        *("--keep-going", "--cores", "2"),
    )
    assert process.returncode == 1
    assert len(served.requests) == asked
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
    line = told(workflow, "import_dataset", "never")
    assert line.startswith("hub dataset lab/never at main: Cannot find an appropriate cached")
