"""Cards, and downloads from a local server that implements the hub's protocol.

Downloads run in a subprocess, because huggingface_hub reads its environment when it is imported.
"""

import json
import os
import random
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from conftest import ROOT
from snakechat.data.hub import card_facts
from support.hub import serving

UNKNOWN = {"licence": None}


@pytest.mark.parametrize(
    ("card", "facts"),
    [
        # Identifiers of SPDX are converted to identifiers of the Hub.
        (b"---\nlicense: CC-BY-4.0\n---\n# Mine", {"licence": "cc-by-4.0"}),
        (
            b"---\nlicense: other\nlicense_name: qwen-research\n---\n",
            {"licence": "other (qwen-research)"},
        ),
        (b"# Mine", UNKNOWN),
        (b"---\nlicense: [mit\n---\n", UNKNOWN),
        (b"---\nlicense: 'mit | [x](http://x)'\n---\n", UNKNOWN),
    ],
)
def test_facts_are_words_of_the_metadata(tmp_path, card, facts):
    assert card_facts(tmp_path) == UNKNOWN
    (tmp_path / "README.md").write_bytes(card)
    assert card_facts(tmp_path) == facts


ENDLESS = {
    "a tag that creates an object of Python": "x: !!python/name:os.system",
    "a number in base 60": "x: 1" + ":1" * 400_000,
    "aliases": "\n".join(
        ["a: &a [1, 2]", *(f"{b}: &{b} [{f'*{a},' * 9}]" for a, b in pairwise("abcdefghijklmnopq"))]
    ),
    "levels": "x: " + "[" * 100_000,
    "keys with one hash": f"x: {{{', '.join(f'{n * (2**61 - 1)}: 1' for n in range(15_000))}}}",
}


@pytest.mark.parametrize("case", ENDLESS)
def test_metadata_that_cannot_be_read_are_none_at_once(tmp_path, case):
    (tmp_path / "README.md").write_text(f"---\n{ENDLESS[case]}\nlicense: mit\n---\n")
    start = time.process_time()
    assert card_facts(tmp_path) == UNKNOWN
    assert time.process_time() - start < 2


# --- downloads --------------------------------------------------------------------------------

DATA = {
    "a.parquet": random.Random(1).randbytes(3_000_000),
    "folder/c.txt": b"a small file, which git keeps\n",
    "not_chosen.bin": b"0" * 100,
}
CHOSEN = [name for name in DATA if name != "not_chosen.bin"]

PROGRAM = """
import json, sys
from snakechat.data.hub import fetch
from snakechat.workflow.errors import InputError

def choose(paths, folder):
    return {"chosen": [path for path in paths if not path.startswith("not_")]}

revision, *repositories = sys.argv[1:]
for repository in repositories:
    try:
        folder, paths = fetch(repository, "dataset", revision, choose)
        print(json.dumps([str(folder), paths["chosen"], folder.name]))
    except InputError as error:
        print(json.dumps(f"{error}"))
"""


def fetch(endpoint, home, *repositories, revision="main", **environment):
    """Fetch each repository into the cache at home; return the results or errors, and stderr."""
    inherited = {key: os.environ[key] for key in os.environ if not key.startswith("HF_")}
    local = {"HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1,localhost", "HF_HOME": str(home)}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, revision, *repositories],
        env={**inherited, **local, "PYTHONPATH": str(ROOT / "scripts"), **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()], process.stderr


def check(result, commit):
    """Check that the folder has all chosen files, byte for byte."""
    folder, found, found_commit = result
    assert (found, found_commit) == (sorted(CHOSEN), commit)
    for name in CHOSEN:
        assert Path(folder, name).read_bytes() == DATA[name]


@pytest.fixture
def hub():
    """A hub with one dataset."""
    with serving() as hub:
        hub.repositories = {"dataset/lab/data": DATA}
        yield hub


DATASET = "dataset/lab/data"
OFFLINE = {"HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
def test_files_are_downloaded_once_and_then_read_from_the_cache(hub, tmp_path):
    (line,), _ = fetch(hub.endpoint, tmp_path, "lab/data", **OFFLINE)
    assert line.startswith("hub dataset lab/data at main: Cannot find an appropriate cached")
    assert "HF_HUB_OFFLINE" in line and "\n" not in line
    token = "hf_onlythehubmayseeit"
    for _ in range(2):
        (result,), err = fetch(hub.endpoint, tmp_path, "lab/data", HF_TOKEN=token)
        check(result, hub.commit(DATASET))
        assert err == ""
        assert hub.loads(DATASET) == {name: 1 for name in CHOSEN}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not [path for path in files if token.encode() in path.read_bytes()]
    commit, requests = hub.commit(DATASET), len(hub.requests)
    for revision in ("main", commit):
        (result,), _ = fetch(hub.endpoint, tmp_path, "lab/data", revision=revision, **OFFLINE)
        check(result, commit)
    assert len(hub.requests) == requests
    # On a file system without links.
    without = {"HF_HUB_DISABLE_SYMLINKS": "1"}
    (result,), _ = fetch(hub.endpoint, tmp_path / "copies", "lab/data", **without)
    check(result, commit)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "replaced"), [("a.parquet", False), ("folder/c.txt", True)])
def test_an_edited_file_of_the_cache_is_an_error_and_then_downloaded(hub, tmp_path, name, replaced):
    ((folder, *_),), _ = fetch(hub.endpoint, tmp_path, "lab/data")
    path = Path(folder, name)
    if replaced:
        # As an editor does that renames: the link to the file is gone.
        path.unlink()
    path.write_bytes(DATA[name][:-1] + b"!")
    for environment in (OFFLINE, {}):
        (line,), _ = fetch(hub.endpoint, tmp_path, "lab/data", **environment)
        assert line.startswith(f"hub dataset lab/data at main: {path} was edited or is damaged: ")
    (result,), _ = fetch(hub.endpoint, tmp_path, "lab/data")
    check(result, hub.commit(DATASET))


@pytest.mark.slow
def test_errors_of_the_hub_are_one_line(hub, tmp_path):
    cases = {
        "lab/list": "500 Internal Server Error",
        "lab/damaged": ".*a.parquet was edited or is damaged",
        "lab/unknown": "404 Client Error. .*Repository Not Found",
    }
    for name in [*cases][:2]:
        hub.repositories[f"dataset/{name}"] = DATA
        hub.faults[f"dataset/{name}"] = name.partition("/")[2]
    lines, _ = fetch(hub.endpoint, tmp_path, *cases)
    assert len(lines) == len(cases), lines
    for line, (name, reason) in zip(lines, cases.items(), strict=True):
        assert re.match(f"hub dataset {name} at main: .*{reason}", line), line
        assert "\n" not in line
    # Offline, none is complete.
    assert not [*tmp_path.rglob("refs/*")]
    (line,), _ = fetch("http://127.0.0.1:1", tmp_path, "lab/data")
    assert line.startswith("hub dataset lab/data at main: ")
    assert "the Hub is unreachable: set path to a local copy" in line and "\n" not in line
