"""What the limits of a job deny, and that they deny nothing else."""

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import ROOT
from snakechat.workflow import publishing
from snakechat.workflow.errors import InputError
from snakechat.workflow.kernel_limits import NETWORK_VERSION, landlock_version
from snakechat.workflow.processes import SERIAL
from snakechat.workflow.publishing import hermetic_version, import_reward_functions, limits_of
from support.specs import EMPTY_SPEC

FILES = {
    "other/data.json": '{"a": 1}',
    "other/module.py": "x = 1",
    "sources/counted.py": "x = 1",
    "sources/uncounted.py": "x = 1",
    "store/train/a/model": "weights",
    "store/train/a/manifest.json": "{}",
    "store/train/b/model": "weights",
    "build.json": '{"config": "secret"}',
    "home/.netrc": "secret",
    "links/sft": "",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What the attempts of tests/support/attempts.py ended with, and the files afterwards."""
    if landlock_version() < NETWORK_VERSION:
        pytest.skip("this kernel has no Landlock with ports")
    folder = tmp_path_factory.mktemp("job")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with sqlite3.connect(folder / "other/data.db") as database:
        database.execute("create table t (a)")
    (folder / "result").mkdir()
    (folder / "private").mkdir()
    program = ROOT / "tests/support/attempts.py"
    limits = {
        "read": [str(program), str(folder / "store/train/a"), str(folder / "sources/counted.py")],
        "folders": [str(folder / "sources"), str(ROOT / "scripts")],
        "write": [str(folder / "result")],
    }
    limits_file = folder / "private/limits.json"
    limits_file.write_text(json.dumps(limits))
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        port = tcp.getsockname()[1]
        # A path of a socket has at most 107 characters.
        os.symlink(folder, link := f"/tmp/job-{port}")
        named.bind(f"{link}/socket")
        os.unlink(link)
        named.listen()
        abstract.bind(f"\0snakechat-{port}")
        abstract.listen()
        arguments = [limits_file, folder / "private", program, folder, port, os.getpid()]
        process = subprocess.run(
            [sys.executable, ROOT / "scripts/confined.py", *map(str, arguments)],
            # A cache of the user's, which a job does not read.
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "home")},
            capture_output=True,
            text=True,
        )
    assert process.returncode == 0, process.stderr
    return folder, json.loads(process.stdout)


def test_what_the_kernel_denies_and_what_a_job_may_do(outcomes):
    folder, ends = outcomes
    assert len(ends["denied"]) >= 48
    assert [attempt for attempt, end in ends["denied"].items() if not end] == []
    # Denied, and not wrong in itself.
    wrong = ("NameError", "AttributeError", "TypeError", "SyntaxError")
    assert [end for end in ends["denied"].values() if end.startswith(wrong)] == []
    assert {attempt: end for attempt, end in ends["allowed"].items() if end} == {}
    assert {name: (folder / name).read_text() for name in FILES} == FILES


def test_modes(monkeypatch):
    assert hermetic_version("off") == 0
    monkeypatch.setattr(publishing, "landlock_version", lambda: 3)
    assert hermetic_version("auto") == 3
    with pytest.raises(InputError, match=r"needs version 4 of Landlock .* has version 3"):
        hermetic_version("require")


# The system calls of Landlock end as on a kernel that does not know them.
WITHOUT_LANDLOCK = """
import errno, platform
from snakechat.evaluation.sandbox import check_sandbox
from snakechat.workflow.errors import InputError
from snakechat.workflow.kernel_limits import ALLOW, FAIL, Rule, filter_program, install_filter
from snakechat.workflow.publishing import check_machine

unknown = [Rule(number, FAIL | errno.ENOSYS) for number in (444, 445, 446)]
install_filter(filter_program(platform.machine(), unknown, ALLOW))
for mode in ("auto", "auto", "off"):
    check_machine(mode, [])
for check in (check_sandbox, lambda: check_machine("require", [])):
    try:
        check()
    except InputError as error:
        print(error)
"""


def test_without_landlock_builds_run_and_unit_tests_do_not():
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_LANDLOCK],
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0
    [line] = process.stderr.splitlines()
    assert line.startswith("warning: the kernel has no Landlock, or a container denies it: ")
    tests, limits = process.stdout.splitlines()
    assert tests.startswith("unit tests of responses need Landlock")
    assert limits.startswith("hermetic: require needs version 4 of Landlock")


@pytest.mark.parametrize("judges", [{}, {"wise": 1}])
def test_a_job_that_asks_a_judge_has_a_network(judges, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"stores": ["store"], "versions": {}, "python": None, "llm_judges": judges}
    job = {name: Path(name) for name in ("target", "result", "states", "log_folder")}
    job |= {"spec": EMPTY_SPEC, "options": SimpleNamespace(**options), "inputs": {}}
    job["placement"] = SERIAL
    assert limits_of(SimpleNamespace(**job), [], [])["network"] == bool(judges)


# --- reward functions, before the first job -----------------------------------------------------


def test_reward_functions_find_modules_as_jobs_do_and_read_what_counts(
    tmp_path, tmp_path_factory, monkeypatch
):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "rewards").mkdir()
    mine, words = tmp_path / "rewards/mine.py", tmp_path / "words.txt"
    mine.write_text("import own_words\n\n\ndef score(prompts, responses):\n    return []\n")
    with pytest.raises(InputError, match="No module named 'own_words'"):
        import_reward_functions(tmp_path, ["mine"], "auto")
    library = tmp_path_factory.mktemp("library")
    (library / "own_words.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(library))
    for mode in ("auto", "off"):
        import_reward_functions(tmp_path, ["mine"], mode)
    mine.write_text(f"open({str(words)!r})\n")
    words.touch()
    with pytest.raises(InputError, match=r"mine.py: line 1: .*words.txt is denied: a job reads"):
        import_reward_functions(tmp_path, ["mine"], "auto")
