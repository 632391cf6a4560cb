"""Faults of the disk: a library for LD_PRELOAD, and programs that load it."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from conftest import ROOT

ERRORS = {"ENOSPC": "No space left on device", "EIO": "Input/output error"}
KINDS = (*ERRORS, "kill")

# Runs programs in forks; their output goes into the file `printed`.
WORKER = """
import importlib, json, os, runpy, sys

for module in sys.argv[1:]:
    importlib.import_module(module)
for line in sys.stdin:
    variables, sys.argv = json.loads(line)
    child = os.fork()
    if not child:
        output = os.open("printed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        os.environ.update(variables)
        runpy.run_path(sys.argv[0], run_name="__main__")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextlib.contextmanager
def running(scratch, compiled, *modules):
    """Work in a new folder; yield a function that runs programs in forks of one process.

    The process has imported modules of the project and has the library of faults. The test
    is skipped if no C compiler is installed.

    Args:
        scratch: Folder of the new working directory.
        compiled: Folder of the library.
        modules: The modules.
    """
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    library, source = compiled / "faults.so", Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    with (
        tempfile.TemporaryDirectory(dir=scratch) as folder,
        contextlib.chdir(folder),
        subprocess.Popen(
            [sys.executable, "-c", WORKER, *modules],
            env={**os.environ, "LD_PRELOAD": library, "PYTHONPATH": ROOT / "scripts"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):

        def run(*words, **named):
            """Run a program, with a fault or not; return its exit code and its output.

            named: A fault in output/; faults.c has the variables: `at` is FAULT_AT.
            """
            if named:
                named["folder"] = f"{Path('output').resolve()}/"
            variables = {f"FAULT_{name.upper()}": str(value) for name, value in named.items()}
            process.stdin.write(json.dumps([variables, words]) + "\n")
            process.stdin.flush()
            return int(process.stdout.readline()), Path("printed").read_text()

        yield run
