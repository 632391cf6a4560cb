"""Words of commands, their interpreter and their files."""

import os
import re
import signal
import sys
from types import SimpleNamespace

import pytest

from snakechat.workflow import commands
from snakechat.workflow.commands import (
    check_versions,
    command_environment,
    command_words,
    named_files,
    pins_in,
    read_interpreter,
    run_words,
)
from snakechat.workflow.errors import InputError
from snakechat.workflow.processes import FORWARDED

VALUES = {"model": "/store/a b; touch x", "output": "/out"}


def test_values_replace_names_within_words_and_no_shell_reads_them():
    words = command_words('train --model={model} \'--args={{"o": "{output}"}}\' $HOME *', VALUES)
    assert words == ["train", "--model=/store/a b; touch x", '--args={"o": "/out"}', "$HOME", "*"]


def test_an_interpreter_has_its_version_and_the_distributions_of_its_environment():
    versions, folders = read_interpreter(sys.executable)
    assert versions["python"] == sys.version.split()[0]
    assert {"torch", "huggingface-hub"} <= versions.keys()
    assert sys.prefix in folders
    for python, message in {"no/python": "does not exist", "/bin/false": "is not Python"}.items():
        with pytest.raises(InputError, match=message):
            read_interpreter(python)


TRL = {"trl": "1.16.0", "python": "3"}
OTHERS = {**TRL, "torch": "2.13.0+cpu"}


# The lock or None, what an interpreter has, and what it lacks.
@pytest.mark.parametrize(
    ("lock", "found", "lacks"),
    [
        ("trl==1.16.0\n# torch==1\nTorch[cpu]==2.13.0 --hash=a\nother==1", OTHERS, None),
        ("trl==1.15.0", OTHERS, "planned with (trl): install them"),
        ("trl>=1", OTHERS, "all of its lock"),
        (None, TRL, None),
        (None, {**TRL, "trl": "2"}, "(trl)"),
        (None, {**TRL, "new": "1"}, "(new)"),
    ],
)
def test_an_environment_has_the_versions_of_the_plan(lock, found, lacks, tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "read_interpreter", lambda _: (found, []))
    settings = SimpleNamespace(distributions=TRL)
    if lock:
        (tmp_path / "lock.txt").write_text(lock)
        planned = {**pins_in(tmp_path / "lock.txt"), "python": "3"}
        settings = SimpleNamespace(distributions=planned, lock="lock.txt")
    if lacks is None:
        assert check_versions("python", settings) == found
    else:
        with pytest.raises(InputError, match=re.escape(lacks)):
            check_versions("python", settings)


def test_paths_folders_and_globs_name_files(tmp_path):
    # Brackets are a pattern elsewhere.
    root = tmp_path / "project [a]"
    for name in ("train.py", "lib/one.py", "lib/two.py", "lib/.hidden", "lib/__pycache__/one.pyc"):
        path = root / "programs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    one, both = ["programs/train.py"], ["programs/lib/one.py", "programs/lib/two.py"]
    for pattern, files in (
        (one[0], one),
        (str(root / one[0]), one),
        ("programs/lib", both),
        ("**/lib/*.py", both),
    ):
        assert list(named_files(root, [pattern])) == files
    with pytest.raises(InputError, match=r"programs/\*.sh does not exist"):
        list(named_files(root, ["programs/*.sh"]))


def test_a_command_gets_the_signals_of_its_job(tmp_path, monkeypatch):
    # What it leaves running has its output open.
    monkeypatch.setattr(commands, "MAX_WAIT", 0.2)
    before = [signal.getsignal(number) for number in FORWARDED]
    # It asks the job to stop, which forwards the signal to it.
    script = "trap 'echo saved; exit 3' TERM; kill -TERM $PPID; sleep 20 & wait"
    code, output = run_words(["bash", "-c", script], tmp_path, os.environ)
    assert [signal.getsignal(number) for number in FORWARDED] == before
    assert (code, output) == (128 + signal.SIGTERM, "saved\n")


def test_a_command_that_nohup_started_outlives_its_terminal(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        script = "kill -HUP $PPID $$; sleep 0.2; echo saved"
        assert run_words(["bash", "-c", script], tmp_path, os.environ) == (0, "saved\n")
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_environment_of_a_command_has_a_folder_of_the_job(monkeypatch):
    shell = {"HOME": "/me", "PYTHONPATH": "/mine", "SNAKECHAT_LOG": "x", "OMP": "2"}
    for name, text in shell.items():
        monkeypatch.setenv(name, text)
    found = command_environment("/job", "/env/bin/python", network=False)
    assert found["OMP"] == "2" and found["HF_HUB_OFFLINE"] == "1"
    assert found["PATH"].startswith("/env/bin:")
    assert not {"PYTHONPATH", "SNAKECHAT_LOG"} & found.keys()
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "TMPDIR"):
        assert found[name] == "/job"
