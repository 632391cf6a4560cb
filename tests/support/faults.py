"""Faults of the disk and of the clock: a library for LD_PRELOAD, and programs that load it."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

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

SOURCE = Path(__file__).with_suffix(".c")


def compile_faults(folder):
    """Return the path of the library of faults.c, compiled into a folder.

    Skips the test where there is no C compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = Path(folder, "faults.so")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"]
    subprocess.run(command, check=True)
    return library


class Worker:
    """A process with the library of faults that runs programs in forks."""

    def __init__(self, process):
        self.process = process

    def run(self, *words, **named):
        """Run a program, with a fault or not; return its exit code and its output.

        named: A fault in output/; faults.c has the variables: `at` is FAULT_AT.
        """
        if named:
            named["folder"] = f"{Path('output').resolve()}/"
        variables = {
            f"FAULT_{name.upper()}": str(value)
            for name, value in named.items()
            if value is not None
        }
        self.process.stdin.write(json.dumps([variables, words]) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline()), Path("printed").read_text()


@contextmanager
def working(library, *modules, path="scripts"):
    """Run a Worker in the working directory; it has imported modules from a folder."""
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, *modules],
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Worker(process)
        process.stdin.close()
